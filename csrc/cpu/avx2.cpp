// The loops with 256-bit vectors.
#include "level.hpp"
#include "target.hpp"

#if HVS_X86

#include <immintrin.h>

#include <array>

namespace hvs {
namespace {

constexpr std::size_t lanes = 8;
constexpr std::size_t group = 4;  // vectors between two looks at whether there are candidates

// For each mask of 8 lanes the permutation that moves the wanted lanes to the front, one byte a lane.
constexpr std::array<std::uint64_t, 256> make_permutations() {
  std::array<std::uint64_t, 256> table{};
  for (unsigned mask = 0; mask < 256; ++mask) {
    unsigned count = 0;
    for (unsigned lane = 0; lane < lanes; ++lane) {
      if (mask >> lane & 1) table[mask] |= std::uint64_t(lane) << (8 * count++);
    }
  }
  return table;
}

constexpr std::array<std::uint64_t, 256> permutations = make_permutations();

HVS_AVX2 inline __m256i keys_of(__m256 x) {
  return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(largest_key<float>));
}

template <bool fresh> HVS_AVX2 inline __m256 sum(const float* gradient, const float* buffer, __m256 scale) {
  if (fresh) return _mm256_add_ps(_mm256_setzero_ps(), _mm256_loadu_ps(gradient));
  return _mm256_add_ps(_mm256_mul_ps(scale, _mm256_loadu_ps(buffer)), _mm256_loadu_ps(gradient));
}

template <bool fresh> HVS_AVX2 void accumulate_as(const float* gradient, float* buffer, std::size_t n, float scale) {
  const __m256 factor = _mm256_set1_ps(scale);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) _mm256_storeu_ps(buffer + i, sum<fresh>(gradient + i, buffer + i, factor));
  portable_float.accumulate(gradient + i, buffer + i, n - i, scale);
}

HVS_AVX2 void accumulate(const float* gradient, float* buffer, std::size_t n, float scale) {
  if (scale == 0) {
    accumulate_as<true>(gradient, buffer, n, scale);
  } else {
    accumulate_as<false>(gradient, buffer, n, scale);
  }
}

HVS_AVX2 inline void append(Entries<float>& entries, __m256i indices, __m256 values, unsigned wanted) {
  const __m128i packed = _mm_cvtsi64_si128(static_cast<long long>(permutations[wanted]));
  const __m256i order = _mm256_cvtepu8_epi32(packed);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(entries.indices + entries.count),
                      _mm256_permutevar8x32_epi32(indices, order));
  _mm256_storeu_ps(entries.values + entries.count, _mm256_permutevar8x32_ps(values, order));
  entries.count += std::size_t(_mm_popcnt_u32(wanted));
}

HVS_AVX2 inline __m256i counting_from(std::int32_t first) {
  return _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Which lanes are above the limit.
HVS_AVX2 inline unsigned above(__m256i keys, __m256i limit) {
  return unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(keys, limit))));
}

template <bool fresh>
HVS_AVX2 void sweep_as(const float* gradient, float* buffer, std::size_t n, float scale, Bracket<std::int32_t> bracket,
                       std::int32_t first, Entries<float>& candidates) {
  const __m256 factor = _mm256_set1_ps(scale);
  const __m256i below_low = _mm256_set1_epi32(bracket.low - 1);
  const __m256i guess = _mm256_set1_epi32(bracket.guess);
  std::size_t i = 0;
  for (; i + group * lanes <= n; i += group * lanes) {
    __m256 acc[group];
    __m256i largest = _mm256_setzero_si256();
    for (std::size_t j = 0; j < group; ++j) {
      float* const at = buffer + i + j * lanes;
      acc[j] = sum<fresh>(gradient + i + j * lanes, at, factor);
      const __m256i keys = keys_of(acc[j]);
      const __m256 stays = _mm256_castsi256_ps(_mm256_cmpgt_epi32(guess, keys));
      _mm256_storeu_ps(at, _mm256_and_ps(stays, acc[j]));
      largest = _mm256_max_epi32(largest, keys);
    }
    if (!above(largest, below_low)) continue;
    for (std::size_t j = 0; j < group; ++j) {
      const __m256i indices = counting_from(first + std::int32_t(i + j * lanes));
      append(candidates, indices, acc[j], above(keys_of(acc[j]), below_low));
    }
  }
  portable_float.sweep(gradient + i, buffer + i, n - i, scale, bracket, first + std::int32_t(i), candidates);
}

HVS_AVX2 void sweep(const float* gradient, float* buffer, std::size_t n, float scale, Bracket<std::int32_t> bracket,
                    std::int32_t first, Entries<float>& candidates) {
  if (scale == 0) {
    sweep_as<true>(gradient, buffer, n, scale, bracket, first, candidates);
  } else {
    sweep_as<false>(gradient, buffer, n, scale, bracket, first, candidates);
  }
}

HVS_AVX2 void filter(const Entries<float>& from, std::size_t first, std::size_t last, std::int32_t limit,
                     Entries<float>& to, std::size_t room) {
  const __m256i limits = _mm256_set1_epi32(limit);
  std::size_t i = first;
  for (; i + lanes <= last && to.count + lanes <= room; i += lanes) {
    const __m256 values = _mm256_loadu_ps(from.values + i);
    const __m256i indices = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from.indices + i));
    append(to, indices, values, above(keys_of(values), limits));
  }
  portable_float.filter(from, i, last, limit, to, room);
}

}  // namespace

const Loops<float> avx2_float = {accumulate, sweep, filter};

}  // namespace hvs

#endif
