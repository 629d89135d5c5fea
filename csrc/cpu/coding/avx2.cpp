#include "coding/coding.hpp"
#include "simd/target.hpp"

#if HVS_X86

#include <immintrin.h>

#include <array>
#include <cstring>

namespace hvs {
namespace {

// For each byte the positions of its ones, from the lowest on.
constexpr std::array<std::uint64_t, 256> make_places() {
  std::array<std::uint64_t, 256> table{};
  for (unsigned byte = 0; byte < 256; ++byte) {
    unsigned count = 0;
    for (unsigned bit = 0; bit < 8; ++bit) {
      if (byte >> bit & 1) table[byte] |= std::uint64_t(bit) << (8 * count++);
    }
  }
  return table;
}

constexpr std::array<std::uint64_t, 256> places = make_places();

// Inclusive prefix sums of eight 32-bit numbers.
HVS_AVX2 inline __m256i prefix_sums(__m256i x) {
  x = _mm256_add_epi32(x, _mm256_slli_si256(x, 4));
  x = _mm256_add_epi32(x, _mm256_slli_si256(x, 8));
  const __m256i low = _mm256_permute2x128_si256(x, x, 0x08);  // zeros, then the lower half
  return _mm256_add_epi32(x, _mm256_shuffle_epi32(low, 0xff));
}

HVS_AVX2 inline std::uint64_t combine(__m256i x) {
  __m128i y = _mm_or_si128(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_or_si128(y, _mm_unpackhi_epi64(y, y));
  return std::uint64_t(_mm_cvtsi128_si64(y));
}

// Stores eight numbers of `bits` <= 16 bits contiguously, followed by zeros up to 16 bytes.
HVS_AVX2 inline void store_lows(__m256i x, __m128i bits, __m128i twice, int four_times, char* out) {
  const __m256i even = _mm256_and_si256(x, _mm256_set1_epi64x(0xffffffff));
  const __m256i pairs = _mm256_or_si256(even, _mm256_sll_epi64(_mm256_srli_epi64(x, 32), bits));
  const __m256i upper = _mm256_sll_epi64(_mm256_unpackhi_epi64(pairs, pairs), twice);
  const __m256i fours = _mm256_or_si256(pairs, upper);
  const auto low = static_cast<unsigned long long>(_mm_cvtsi128_si64(_mm256_castsi256_si128(fours)));
  const auto high = static_cast<unsigned long long>(_mm_cvtsi128_si64(_mm256_extracti128_si256(fours, 1)));
  const unsigned __int128 all = low | static_cast<unsigned __int128>(high) << four_times;
  std::memcpy(out, &all, sizeof all);
}

}  // namespace

HVS_AVX2 std::size_t encode_groups_avx2(const std::int32_t* indices, std::size_t gaps, int bits, char* lows,
                                        std::size_t low_bytes, BitWriter& highs) {
  if (bits > 16) return 0;
  BitWriter writer = highs;  // a copy stays in registers
  const __m128i by = _mm_cvtsi32_si128(bits), twice = _mm_cvtsi32_si128(2 * bits);
  const __m256i one = _mm256_set1_epi32(1), mask = _mm256_set1_epi32((1 << bits) - 1);
  std::size_t i = 0, at = 0;
  // A store may reach past the low bits of the group, but not past the low bits of all gaps.
  for (; i + gap_group <= gaps && (bits == 0 || at + 16 <= low_bytes); i += gap_group, at += std::size_t(bits)) {
    const __m256i before = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(indices + i));
    const __m256i here = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(indices + i + 1));
    const __m256i gap = _mm256_sub_epi32(_mm256_sub_epi32(here, before), one);
    if (bits > 0) store_lows(_mm256_and_si256(gap, mask), by, twice, 4 * bits, lows + at);
    const __m256i high = _mm256_srl_epi32(gap, by);
    // A one follows the zeros and ones before it, so its position is a prefix sum. The sum is below 2^32, as that of
    // all gaps is. Long runs of zeros are rare.
    const __m256i places = _mm256_sub_epi32(prefix_sums(_mm256_add_epi32(high, one)), one);
    const auto length = std::size_t(std::uint32_t(_mm256_extract_epi32(places, 7))) + 1;
    if (length > 64) {
      alignas(32) std::uint32_t number[gap_group];
      _mm256_store_si256(reinterpret_cast<__m256i*>(number), high);
      for (const std::uint32_t x : number) writer.append_unary(x);
      continue;
    }
    const __m256i bit = _mm256_set1_epi64x(1);
    const __m256i low = _mm256_sllv_epi64(bit, _mm256_cvtepu32_epi64(_mm256_castsi256_si128(places)));
    const __m256i upper = _mm256_sllv_epi64(bit, _mm256_cvtepu32_epi64(_mm256_extracti128_si256(places, 1)));
    writer.append(combine(_mm256_or_si256(low, upper)), length);
  }
  highs = writer;
  return i;
}

// Four of ten bits are ones, so handling bytes is faster than handling single ones.
HVS_AVX2 std::size_t list_ones_avx2(const std::uint64_t* words, std::size_t count, std::size_t first,
                                    std::int32_t* ones) {
  std::size_t listed = 0;
  __m256i base = _mm256_set1_epi32(int(std::uint32_t(first)));
  for (std::size_t w = 0; w < count; ++w) {
    for (std::uint64_t word = words[w], byte = 0; byte < 8; ++byte, word >>= 8) {
      const __m128i packed = _mm_cvtsi64_si128(static_cast<long long>(places[word & 255]));
      const __m256i at = _mm256_add_epi32(base, _mm256_cvtepu8_epi32(packed));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(ones + listed), at);
      listed += std::size_t(_mm_popcnt_u64(word & 255));
      base = _mm256_add_epi32(base, _mm256_set1_epi32(8));
    }
  }
  return listed;
}

HVS_AVX2 std::size_t decode_groups_avx2(const char* lows, std::size_t readable, int bits, std::size_t from,
                                        std::size_t gaps, const std::int32_t* ones, std::uint64_t& sum,
                                        std::int32_t* indices) {
  // The lower four numbers of a group begin at a byte, the upper four `half` bytes later; each four fit in 16 bytes.
  const int half = 4 * bits / 8, rest = 4 * bits % 8;
  alignas(32) std::uint8_t bytes[32];
  alignas(32) std::uint32_t shifts[8];
  for (int lane = 0; lane < 8; ++lane) {
    const int place = lane < 4 ? lane * bits : rest + (lane - 4) * bits;
    for (int b = 0; b < 4; ++b) bytes[4 * lane + b] = std::uint8_t(place / 8 + b);
    shifts[lane] = std::uint32_t(place % 8);
  }
  const __m256i shuffle = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes));
  const __m256i shift = _mm256_load_si256(reinterpret_cast<const __m256i*>(shifts));
  const __m256i mask = _mm256_set1_epi32((1 << bits) - 1), one = _mm256_set1_epi32(1);
  const __m128i by = _mm_cvtsi32_si128(bits);
  const __m256i counting = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  std::uint64_t before = sum;
  std::size_t i = 0, at = from / 8 * std::size_t(bits);
  for (; i + gap_group <= gaps && at + std::size_t(half) + 16 <= readable; i += gap_group, at += std::size_t(bits)) {
    const __m128i lower = _mm_loadu_si128(reinterpret_cast<const __m128i*>(lows + at));
    const __m128i upper = _mm_loadu_si128(reinterpret_cast<const __m128i*>(lows + at + half));
    const __m256i packed = _mm256_inserti128_si256(_mm256_castsi128_si256(lower), upper, 1);
    const __m256i low = _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(packed, shuffle), shift), mask);
    const __m256i sums = prefix_sums(_mm256_add_epi32(low, one));
    const __m256i number = _mm256_add_epi32(_mm256_set1_epi32(int(std::uint32_t(from + i))), counting);
    const __m256i place = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ones + i));
    const __m256i zeros = _mm256_sll_epi32(_mm256_sub_epi32(place, number), by);
    const __m256i start = _mm256_set1_epi32(int(std::uint32_t(before)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(indices + i), _mm256_add_epi32(_mm256_add_epi32(start, sums), zeros));
    before += std::uint32_t(_mm256_extract_epi32(sums, 7));
  }
  sum = before;
  return i;
}

}  // namespace hvs

#endif
