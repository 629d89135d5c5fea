#include <algorithm>

#include "../common/bits.hpp"
#include "coding/coding.hpp"
#include "simd/dispatch.hpp"

namespace hvs {
namespace {

struct FindRange {
  template <class Real> static HVS_INLINE void run(const Real* values, std::size_t count, std::int32_t* least, std::int32_t* largest) {
    std::int32_t low = infinite_key, high = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::int32_t key = key_of(values[i]);
      const bool known = key < infinite_key;
      low = std::min(low, known && key > 0 ? key : infinite_key);
      high = std::max(high, known ? key : 0);
    }
    *least = high == 0 ? 0 : low;
    *largest = high;
  }
};

constexpr std::size_t round_block = 512;

struct Round {
  template <class Real>
  static HVS_INLINE void run(const Real* values, std::size_t count, Levels levels, Real* __restrict rounded,
                             Real* __restrict rest) {
    // Compilers do not vectorise a single loop.
    std::uint8_t codes[round_block];
    for (std::size_t first = 0; first < count; first += round_block) {
      const std::size_t end = std::min(count, first + round_block);
      for (std::size_t i = first; i < end; ++i) codes[i - first] = level_code(levels, key_of(values[i]), values[i] < 0);
      for (std::size_t i = first; i < end; ++i) rounded[i] = Real(level_value(levels, codes[i - first]));
      for (std::size_t i = first; i < end; ++i) {
        const Real x = values[i], near = rounded[i], left = x - near;
        const bool finite = x - x == 0, exact = x - left == near;
        rounded[i] = !finite ? x : exact ? near : Real(0);
        rest[i] = !finite ? Real(0) : exact ? left : x;
      }
    }
  }
};

template <int bits> struct Encode {
  template <class Real>
  static HVS_INLINE void run(const Real* values, std::size_t count, Levels levels, std::uint8_t* __restrict codes) {
    const auto code = [&](std::size_t i) { return level_code(levels, key_of(values[i]), values[i] < 0); };
    if (bits == 8) {
      for (std::size_t i = 0; i < count; ++i) codes[i] = code(i);
      return;
    }
    for (std::size_t i = 0; i < count / 2; ++i) codes[i] = std::uint8_t(code(2 * i) | code(2 * i + 1) << 4);
    if (count % 2) codes[count / 2] = code(count - 1);
  }
};

template <int bits> struct Decode {
  template <class Real>
  static HVS_INLINE void run(const std::uint8_t* codes, std::size_t count, Levels levels, Real* __restrict values) {
    if (bits == 8) {
      for (std::size_t i = 0; i < count; ++i) values[i] = Real(level_value(levels, codes[i]));
      return;
    }
    for (std::size_t i = 0; i < count / 2; ++i) {
      values[2 * i] = Real(level_value(levels, codes[i] & 15));
      values[2 * i + 1] = Real(level_value(levels, codes[i] >> 4));
    }
    if (count % 2) values[count - 1] = Real(level_value(levels, codes[count / 2] & 15));
  }
};

}  // namespace

template <class Real> void key_range(const Real* values, std::size_t count, std::int32_t& low, std::int32_t& high) {
  run_at_level<FindRange>(values, count, &low, &high);
}

template <class Real>
void round_to_levels(const Real* values, std::size_t count, const Levels& levels, Real* rounded, Real* rest) {
  run_at_level<Round>(values, count, levels, rounded, rest);
}

template <class Real>
void encode_levels(const Real* values, std::size_t count, const Levels& levels, int bits, std::uint8_t* codes) {
  bits == 8 ? run_at_level<Encode<8>>(values, count, levels, codes)
            : run_at_level<Encode<4>>(values, count, levels, codes);
}

template <class Real>
void decode_levels(const std::uint8_t* codes, std::size_t count, const Levels& levels, int bits, Real* values) {
  bits == 8 ? run_at_level<Decode<8>>(codes, count, levels, values)
            : run_at_level<Decode<4>>(codes, count, levels, values);
}

template void key_range(const float*, std::size_t, std::int32_t&, std::int32_t&);
template void key_range(const double*, std::size_t, std::int32_t&, std::int32_t&);
template void round_to_levels(const float*, std::size_t, const Levels&, float*, float*);
template void round_to_levels(const double*, std::size_t, const Levels&, double*, double*);
template void encode_levels(const float*, std::size_t, const Levels&, int, std::uint8_t*);
template void encode_levels(const double*, std::size_t, const Levels&, int, std::uint8_t*);
template void decode_levels(const std::uint8_t*, std::size_t, const Levels&, int, float*);
template void decode_levels(const std::uint8_t*, std::size_t, const Levels&, int, double*);

}  // namespace hvs
