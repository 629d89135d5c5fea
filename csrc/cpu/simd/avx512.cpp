// The loops with 512-bit vectors.
#include "simd/lanes.hpp"
#include "simd/level.hpp"
#include "simd/target.hpp"
#include "stream.hpp"

#if HVS_X86

#include <immintrin.h>

#include <algorithm>

namespace hvs {
namespace {

constexpr std::size_t lanes = 16;
constexpr std::size_t group = 8;  // vectors that are tested together for candidates

HVS_AVX512 inline __mmask16 first_lanes(std::size_t n) { return __mmask16((1u << n) - 1); }

HVS_AVX512 inline __m512i keys_of(__m512 x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(largest_key<float>));
}

HVS_AVX512 void widen_halves(const char* halves, std::size_t n, float* out) {
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + 2 * i));
    _mm512_storeu_ps(out + i, _mm512_maskz_cvtph_ps(0xffff, packed));
  }
  portable_float.widen_halves(halves + 2 * i, n - i, out + i);
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

HVS_AVX512 void update_velocity(const float* gradient, float* values, std::size_t n, const Velocity<float>& how,
                                float* added) {
  update_velocity_lanes(gradient, values, n, how, added);
}

HVS_AVX512 Sums measure(const float* gradient, float* buffer, std::size_t n, float scale) {
  return measure_lanes<8>(gradient, buffer, n, scale);
}

HVS_AVX512 double square(const float* x, std::size_t n) { return square_lanes<8>(x, n); }

HVS_AVX512 Tail tail(const float* x, std::size_t n, float low) { return tail_lanes<8>(x, n, low); }

// The AVX2 loop: comparisons of 512-bit vectors give masks, which take longer to count.
void count(const float* x, std::size_t n, const float* low, std::int64_t* counts) {
  avx2_float.count(x, n, low, counts);
}

HVS_AVX512 inline __m512i counting_from(std::int32_t first) {
  const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_add_epi32(_mm512_set1_epi32(first), steps);
}

// Writes the wanted lanes contiguously; returns their number. Compresses in a register and stores a full vector,
// because compressing stores to memory are slow on Zen 4.
HVS_AVX512 inline std::size_t pack(__m512i x, __mmask16 wanted, void* out) {
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(wanted, x));
  return std::size_t(_mm_popcnt_u32(wanted));
}

template <bool fresh>
HVS_AVX512 std::size_t scan_as(const float* gradient, float* buffer, std::size_t n, float scale, std::int32_t low,
                               std::int32_t first, std::int32_t* indices) {
  const __m512 factor = _mm512_set1_ps(scale);
  const __m512i limit = _mm512_set1_epi32(low);
  std::size_t i = 0, count = 0;
  for (; i + group * lanes <= n; i += group * lanes) {
    __mmask16 wanted[group];
    unsigned any = 0;
    for (std::size_t j = 0; j < group; ++j) {
      float* const at = buffer + i + j * lanes;
      const __m512 acc = sum<fresh>(_mm512_loadu_ps(gradient + i + j * lanes), at, 0xffff, factor);
      _mm512_storeu_ps(at, acc);
      wanted[j] = _mm512_cmpge_epi32_mask(keys_of(acc), limit);
      any |= wanted[j];
    }
    if (!any) continue;
    for (std::size_t j = 0; j < group; ++j) {
      count += pack(counting_from(first + std::int32_t(i + j * lanes)), wanted[j], indices + count);
    }
  }
  const std::int32_t next = first + std::int32_t(i);
  return count + portable_float.scan(gradient + i, buffer + i, n - i, scale, low, next, indices + count);
}

HVS_AVX512 std::size_t scan(const float* gradient, float* buffer, std::size_t n, float scale, std::int32_t low,
                            std::int32_t first, std::int32_t* indices) {
  return scale == 0 ? scan_as<true>(gradient, buffer, n, scale, low, first, indices)
                    : scan_as<false>(gradient, buffer, n, scale, low, first, indices);
}

template <bool fresh>
HVS_AVX512 std::size_t scan_apart_as(const float* gradient, const float* source, float* buffer, std::size_t n, float scale,
                                     std::int32_t below, std::int32_t most, std::int32_t first, std::int32_t* indices) {
  const __m512 factor = _mm512_set1_ps(scale);
  const __m512i floor = _mm512_set1_epi32(below), limit = _mm512_set1_epi32(most);
  std::size_t i = std::min(n, elements_before_line(buffer));
  std::size_t count = portable_float.scan_apart(gradient, source, buffer, i, scale, below, most, first, indices);
  for (; i + group * lanes <= n; i += group * lanes) {
    __mmask16 wanted[group];
    unsigned any = 0;
    for (std::size_t j = 0; j < group; ++j) {
      const std::size_t at = i + j * lanes;
      const __m512 acc = sum<fresh>(_mm512_loadu_ps(gradient + at), source + at, 0xffff, factor);
      const __m512i keys = keys_of(acc);
      _mm512_stream_ps(buffer + at, _mm512_maskz_mov_ps(_mm512_cmple_epi32_mask(keys, limit), acc));
      wanted[j] = _mm512_cmpgt_epi32_mask(keys, floor);
      any |= wanted[j];
    }
    if (!any) continue;
    for (std::size_t j = 0; j < group; ++j) {
      count += pack(counting_from(first + std::int32_t(i + j * lanes)), wanted[j], indices + count);
    }
  }
  const std::int32_t next = first + std::int32_t(i);
  return count + portable_float.scan_apart(gradient + i, source + i, buffer + i, n - i, scale, below, most, next,
                                           indices + count);
}

HVS_AVX512 std::size_t scan_apart(const float* gradient, const float* source, float* buffer, std::size_t n, float scale,
                                  std::int32_t below, std::int32_t most, std::int32_t first, std::int32_t* indices) {
  return scale == 0 ? scan_apart_as<true>(gradient, source, buffer, n, scale, below, most, first, indices)
                    : scan_apart_as<false>(gradient, source, buffer, n, scale, below, most, first, indices);
}

HVS_AVX512 void filter(const Entries<float>& from, std::size_t first, std::size_t last, Range<std::int32_t> range,
                       Entries<float>& to, std::size_t room) {
  std::size_t i = first;
  for (; i + lanes <= last && to.count + lanes <= room; i += lanes) {
    const __m512 values = _mm512_loadu_ps(from.values + i);
    const __m512i keys = keys_of(values);
    const __mmask16 above = _mm512_cmpgt_epi32_mask(keys, _mm512_set1_epi32(range.above));
    const __mmask16 wanted = _mm512_mask_cmple_epi32_mask(above, keys, _mm512_set1_epi32(range.upto));
    pack(_mm512_loadu_si512(from.indices + i), wanted, to.indices + to.count);
    to.count += pack(_mm512_castps_si512(values), wanted, to.values + to.count);
  }
  portable_float.filter(from, i, last, range, to, room);
}

std::size_t list_bits(const std::uint64_t* words, std::size_t count, std::size_t first, std::int32_t* indices) {
  return avx2_float.list_bits(words, count, first, indices);
}

}  // namespace

const Loops<float> avx512_float = {widen_halves, accumulate, update_velocity, measure, square,   tail,
                                    count,        scan,       scan_apart,      filter,  list_bits};

}  // namespace hvs

#endif
