// The loops with 256-bit vectors.
#include "simd/lanes.hpp"
#include "simd/level.hpp"
#include "simd/target.hpp"
#include "stream.hpp"

#if HVS_X86

#include <immintrin.h>

#include <algorithm>
#include <array>

namespace hvs {
namespace {

constexpr std::size_t lanes = 8;

// For each mask of 8 lanes, the permutation that moves the wanted lanes to the front, one byte per lane.
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

HVS_AVX2 void widen_halves(const char* halves, std::size_t n, float* out) {
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + 2 * i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(packed));
  }
  portable_float.widen_halves(halves + 2 * i, n - i, out + i);
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

HVS_AVX2 void update_velocity(const float* gradient, float* values, std::size_t n, const Velocity<float>& how,
                              float* added) {
  update_velocity_lanes(gradient, values, n, how, added);
}

HVS_AVX2 Sums measure(const float* gradient, float* buffer, std::size_t n, float scale) {
  return measure_lanes<4>(gradient, buffer, n, scale);
}

HVS_AVX2 double square(const float* x, std::size_t n) { return square_lanes<4>(x, n); }

HVS_AVX2 Tail tail(const float* x, std::size_t n, float low) { return tail_lanes<4>(x, n, low); }

HVS_AVX2 void count(const float* x, std::size_t n, const float* low, std::int64_t* counts) {
  count_reaching<8>(x, n, low, counts);
}

HVS_AVX2 inline __m256i counting_from(std::int32_t first) {
  return _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// A bit per lane, set if it is above the limit.
HVS_AVX2 inline unsigned above(__m256i keys, __m256i limit) {
  return unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(keys, limit))));
}

// Writes the wanted lanes contiguously, with a store of a full vector; returns their number.
HVS_AVX2 inline std::size_t pack(__m256i x, unsigned wanted, void* out) {
  const __m128i bytes = _mm_cvtsi64_si128(static_cast<long long>(permutations[wanted]));
  const __m256i packed = _mm256_permutevar8x32_epi32(x, _mm256_cvtepu8_epi32(bytes));
  _mm256_storeu_si256(static_cast<__m256i*>(out), packed);
  return std::size_t(_mm_popcnt_u32(wanted));
}

// See the portable loop.
HVS_AVX2 std::size_t list_bits(const std::uint64_t* words, std::size_t count, std::size_t first,
                               std::int32_t* indices) {
  constexpr std::size_t batch = 8;
  std::size_t listed = 0;
  for (std::size_t w = 0; w < count; ++w) {
    std::uint64_t bits = words[w];
    if (!bits) continue;
    const std::size_t end = listed + std::size_t(_mm_popcnt_u64(bits));
    for (; listed < end; listed += batch) {
      for (std::size_t i = 0; i < batch; ++i, bits = _blsr_u64(bits)) {
        indices[listed + i] = std::int32_t(first + w * word + std::size_t(_tzcnt_u64(bits)));
      }
    }
    listed = end;
  }
  return listed;
}

// Bitmap of the wanted elements of a tile. They are listed after the tile is scanned: a branch per few elements, which
// the CPU cannot predict, would delay the loads that follow.
struct Wanted {
  static constexpr std::size_t group = 4;  // words that are tested together for any wanted element
  std::uint64_t words[tile_of_sums / word];

  HVS_AVX2 void set(std::size_t vector, unsigned lanes_wanted) {
    reinterpret_cast<std::uint8_t*>(words)[vector] = std::uint8_t(lanes_wanted);
  }
  // Lists the wanted elements of the first `vectors` vectors, `batch` at a time even if a word has fewer.
  HVS_AVX2 std::size_t list(std::size_t vectors, std::int32_t first, std::int32_t* indices) {
    constexpr std::size_t per_group = group * word / lanes, batch = 4;
    const std::size_t groups = (vectors + per_group - 1) / per_group;
    for (std::size_t vector = vectors; vector < groups * per_group; ++vector) set(vector, 0);
    std::size_t listed = 0;
    for (std::size_t w = 0; w < groups * group; w += group) {
      if (!(words[w] | words[w + 1] | words[w + 2] | words[w + 3])) continue;
      for (std::size_t j = w; j < w + group; ++j) {
        std::uint64_t bits = words[j];
        const std::size_t end = listed + std::size_t(_mm_popcnt_u64(bits));
        do {
          for (std::size_t i = 0; i < batch; ++i, bits = _blsr_u64(bits)) {
            indices[listed + i] = first + std::int32_t(j * word + std::size_t(_tzcnt_u64(bits)));
          }
          listed += batch;
        } while (listed < end);
        listed = end;
      }
    }
    return listed;
  }
};

template <bool fresh>
HVS_AVX2 std::size_t scan_as(const float* gradient, float* buffer, std::size_t n, float scale, std::int32_t low,
                             std::int32_t first, std::int32_t* indices) {
  const __m256 factor = _mm256_set1_ps(scale);
  const __m256i limit = _mm256_set1_epi32(low - 1);
  Wanted wanted;
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const __m256 acc = sum<fresh>(gradient + i, buffer + i, factor);
    _mm256_storeu_ps(buffer + i, acc);
    wanted.set(i / lanes, above(keys_of(acc), limit));
  }
  const std::size_t count = wanted.list(i / lanes, first, indices);
  const std::int32_t next = first + std::int32_t(i);
  return count + portable_float.scan(gradient + i, buffer + i, n - i, scale, low, next, indices + count);
}

HVS_AVX2 std::size_t scan(const float* gradient, float* buffer, std::size_t n, float scale, std::int32_t low,
                          std::int32_t first, std::int32_t* indices) {
  return scale == 0 ? scan_as<true>(gradient, buffer, n, scale, low, first, indices)
                    : scan_as<false>(gradient, buffer, n, scale, low, first, indices);
}

template <bool fresh>
HVS_AVX2 std::size_t scan_apart_as(const float* gradient, const float* source, float* buffer, std::size_t n, float scale,
                                   std::int32_t below, std::int32_t most, std::int32_t first, std::int32_t* indices) {
  const __m256 factor = _mm256_set1_ps(scale);
  const __m256i floor = _mm256_set1_epi32(below), limit = _mm256_set1_epi32(most);
  const std::size_t head = std::min(n, elements_before_line(buffer)), vectors = (n - head) / lanes;
  std::size_t count = portable_float.scan_apart(gradient, source, buffer, head, scale, below, most, first, indices);
  Wanted wanted;
  for (std::size_t v = 0; v < vectors; ++v) {
    const std::size_t i = head + v * lanes;
    const __m256 acc = sum<fresh>(gradient + i, source + i, factor);
    const __m256i keys = keys_of(acc);
    _mm256_stream_ps(buffer + i, _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(keys, limit)), acc));
    wanted.set(v, above(keys, floor));
  }
  count += wanted.list(vectors, first + std::int32_t(head), indices + count);
  const std::size_t i = head + vectors * lanes;
  return count + portable_float.scan_apart(gradient + i, source + i, buffer + i, n - i, scale, below, most,
                                           first + std::int32_t(i), indices + count);
}

HVS_AVX2 std::size_t scan_apart(const float* gradient, const float* source, float* buffer, std::size_t n, float scale,
                                std::int32_t below, std::int32_t most, std::int32_t first, std::int32_t* indices) {
  return scale == 0 ? scan_apart_as<true>(gradient, source, buffer, n, scale, below, most, first, indices)
                    : scan_apart_as<false>(gradient, source, buffer, n, scale, below, most, first, indices);
}

HVS_AVX2 void filter(const Entries<float>& from, std::size_t first, std::size_t last, Range<std::int32_t> range,
                     Entries<float>& to, std::size_t room) {
  std::size_t i = first;
  for (; i + lanes <= last && to.count + lanes <= room; i += lanes) {
    const __m256 values = _mm256_loadu_ps(from.values + i);
    const __m256i keys = keys_of(values);
    const unsigned beyond = above(keys, _mm256_set1_epi32(range.upto));
    const unsigned wanted = above(keys, _mm256_set1_epi32(range.above)) & ~beyond;
    pack(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from.indices + i)), wanted, to.indices + to.count);
    to.count += pack(_mm256_castps_si256(values), wanted, to.values + to.count);
  }
  portable_float.filter(from, i, last, range, to, room);
}

}  // namespace

const Loops<float> avx2_float = {widen_halves, accumulate, update_velocity, measure, square,   tail,
                                  count,        scan,       scan_apart,      filter,  list_bits};

}  // namespace hvs

#endif
