#include "simd/level.hpp"

#include <atomic>
#include <stdexcept>

#include "simd/target.hpp"

#if HVS_X86
#include <cpuid.h>
#endif

namespace hvs {
namespace {

struct Level {
  const char* name;
  bool (*supported)();
  const Loops<float>* loops;
  Simd simd;
};

#if HVS_X86
// Some compilers' __builtin_cpu_supports does not know F16C.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

const Level levels[] = {
#if HVS_X86
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
     },
     &avx512_float, Simd::avx512},
    {"avx2",
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt") &&
              has_f16c();
     },
     &avx2_float, Simd::avx2},
#endif
    {"portable", [] { return true; }, &portable_float, Simd::portable},
};

const Level& best_level() {
  for (const Level& level : levels) {
    if (level.supported()) return level;
  }
  throw std::logic_error("the portable level is always supported");
}

std::atomic<const Level*>& current() {
  static std::atomic<const Level*> level{&best_level()};
  return level;
}

std::string supported_names() {
  std::string names;
  for (const Level& level : levels) {
    if (level.supported()) names += (names.empty() ? "" : ", ") + std::string(level.name);
  }
  return names;
}

}  // namespace

template <> const Loops<float>& loops<float>() { return *current().load()->loops; }
template <> const Loops<double>& loops<double>() { return portable_double; }

Simd simd() { return current().load()->simd; }

std::string simd_level() { return current().load()->name; }

void use_simd(const std::string& name) {
  if (name.empty()) {
    current() = &best_level();
    return;
  }
  for (const Level& level : levels) {
    if (name == level.name && level.supported()) {
      current() = &level;
      return;
    }
  }
  throw std::invalid_argument("SIMD level '" + name + "' is not supported; this machine has: " + supported_names());
}

}  // namespace hvs
