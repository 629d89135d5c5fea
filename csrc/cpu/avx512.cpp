// The loops with 512-bit vectors.
#include "level.hpp"
#include "target.hpp"

#if HVS_X86

#include <immintrin.h>

namespace hvs {
namespace {

constexpr std::size_t lanes = 16;

HVS_AVX512 inline __mmask16 first_lanes(std::size_t n) { return __mmask16((1u << n) - 1); }

HVS_AVX512 inline __m512i keys_of(__m512 x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(largest_key<float>));
}

template <bool fresh> HVS_AVX512 inline __m512 sum(__m512 gradient, const float* buffer, __mmask16 mask, __m512 scale) {
  if (fresh) return _mm512_add_ps(_mm512_setzero_ps(), gradient);
  return _mm512_add_ps(_mm512_mul_ps(scale, _mm512_maskz_loadu_ps(mask, buffer)), gradient);
}

template <bool fresh> HVS_AVX512 void accumulate_as(const float* gradient, float* buffer, std::size_t n, float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    _mm512_storeu_ps(buffer + i, sum<fresh>(_mm512_loadu_ps(gradient + i), buffer + i, 0xffff, factor));
  }
  const __mmask16 rest = first_lanes(n - i);
  const __m512 acc = sum<fresh>(_mm512_maskz_loadu_ps(rest, gradient + i), buffer + i, rest, factor);
  _mm512_mask_storeu_ps(buffer + i, rest, acc);
}

HVS_AVX512 void accumulate(const float* gradient, float* buffer, std::size_t n, float scale) {
  if (scale == 0) {
    accumulate_as<true>(gradient, buffer, n, scale);
  } else {
    accumulate_as<false>(gradient, buffer, n, scale);
  }
}

// Compresses in registers and stores whole vectors: compressing stores to memory are slow on Zen 4.
HVS_AVX512 inline void append(Entries<float>& entries, __m512i indices, __m512 values, __mmask16 wanted) {
  _mm512_storeu_si512(entries.indices + entries.count, _mm512_maskz_compress_epi32(wanted, indices));
  _mm512_storeu_ps(entries.values + entries.count, _mm512_maskz_compress_ps(wanted, values));
  entries.count += std::size_t(_mm_popcnt_u32(wanted));
}

HVS_AVX512 inline __m512i counting_from(std::int32_t first) {
  const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_add_epi32(_mm512_set1_epi32(first), steps);
}

struct Limits {
  __m512 scale;
  __m512i low, guess;
};

// One vector: writes what stays, returns acc and which of its lanes are candidates.
template <bool fresh>
HVS_AVX512 inline __mmask16 step(const float* gradient, float* buffer, __mmask16 mask, const Limits& limits,
                                 __m512& acc) {
  acc = sum<fresh>(_mm512_maskz_loadu_ps(mask, gradient), buffer, mask, limits.scale);
  const __m512i keys = keys_of(acc);
  const __mmask16 stays = _mm512_cmplt_epi32_mask(keys, limits.guess);
  _mm512_mask_storeu_ps(buffer, mask, _mm512_maskz_mov_ps(stays, acc));
  return _mm512_mask_cmpge_epi32_mask(mask, keys, limits.low);
}

template <bool fresh>
HVS_AVX512 void sweep_as(const float* gradient, float* buffer, std::size_t n, float scale,
                         Bracket<std::int32_t> bracket, std::int32_t first, Entries<float>& candidates) {
  const Limits limits = {_mm512_set1_ps(scale), _mm512_set1_epi32(bracket.low), _mm512_set1_epi32(bracket.guess)};
  std::size_t i = 0;
  for (; i < n; i += lanes) {
    const __mmask16 mask = n - i < lanes ? first_lanes(n - i) : __mmask16(0xffff);
    __m512 acc;
    const __mmask16 wanted = step<fresh>(gradient + i, buffer + i, mask, limits, acc);
    if (wanted) append(candidates, counting_from(first + std::int32_t(i)), acc, wanted);
  }
}

HVS_AVX512 void sweep(const float* gradient, float* buffer, std::size_t n, float scale, Bracket<std::int32_t> bracket,
                      std::int32_t first, Entries<float>& candidates) {
  if (scale == 0) {
    sweep_as<true>(gradient, buffer, n, scale, bracket, first, candidates);
  } else {
    sweep_as<false>(gradient, buffer, n, scale, bracket, first, candidates);
  }
}

HVS_AVX512 void filter(const Entries<float>& from, std::size_t first, std::size_t last, std::int32_t limit,
                       Entries<float>& to, std::size_t room) {
  std::size_t i = first;
  for (; i + lanes <= last && to.count + lanes <= room; i += lanes) {
    const __m512 values = _mm512_loadu_ps(from.values + i);
    const __mmask16 wanted = _mm512_cmpgt_epi32_mask(keys_of(values), _mm512_set1_epi32(limit));
    append(to, _mm512_loadu_si512(from.indices + i), values, wanted);
  }
  portable_float.filter(from, i, last, limit, to, room);
}

}  // namespace

const Loops<float> avx512_float = {accumulate, sweep, filter};

}  // namespace hvs

#endif
