#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "coding/coding.hpp"
#include "simd/level.hpp"
#include "simd/target.hpp"

namespace hvs {
namespace {

constexpr std::size_t sampled = 1024;  // gaps sampled to choose the number of low bits
constexpr std::size_t chunk = 64;      // words listed at a time

inline std::uint32_t gap(const std::int32_t* indices, std::size_t i) {
  return std::uint32_t(indices[i + 1]) - std::uint32_t(indices[i]) - 1;
}

inline std::uint64_t load_word(const char* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// The `bits` bits at bit number `place`. Reads the next word only if the bits extend into it.
inline std::uint32_t bits_at(const char* words, std::size_t place, int bits) {
  if (bits == 0) return 0;
  const std::size_t word = place / 64, shift = place % 64;
  std::uint64_t x = load_word(words + 8 * word) >> shift;
  if (shift + std::size_t(bits) > 64) x |= load_word(words + 8 * (word + 1)) << (64 - shift);
  return std::uint32_t(x) & ((1u << bits) - 1);
}

[[noreturn]] void damaged(const std::string& why) { throw std::invalid_argument("coded indices: " + why); }

// Lists the ones of the words, like loops().list_bits.
std::size_t list_ones(const std::uint64_t* words, std::size_t count, std::size_t first, std::int32_t* ones) {
#if HVS_X86
  if (simd() != Simd::portable) return list_ones_avx2(words, count, first, ones);
#endif
  return portable_float.list_bits(words, count, first, ones);
}

struct Decoder {
  const char* lows;
  std::size_t readable;
  int bits;
  std::uint64_t sum;
  std::int32_t* indices;  // indices after the first one
  std::size_t done = 0;

  // Decodes the next gaps, whose ones are listed.
  void run(const std::int32_t* ones, std::size_t gaps) {
    std::size_t i = 0;
#if HVS_X86
    if (simd() != Simd::portable) {
      i = decode_groups_avx2(lows, readable, bits, done, gaps, ones, sum, indices + done);
    }
#endif
    for (; i < gaps; ++i) {
      sum += bits_at(lows, (done + i) * std::size_t(bits), bits) + 1;
      const std::uint32_t zeros = std::uint32_t(ones[i]) - std::uint32_t(done + i);
      indices[done + i] = std::int32_t(std::uint32_t(sum) + (zeros << bits));
    }
    done += gaps;
  }
};

}  // namespace

int choose_low_bits(const std::int32_t* indices, std::size_t count) {
  if (count < 2) return 0;
  const std::size_t gaps = count - 1, stride = (gaps + sampled - 1) / sampled;
  std::uint32_t sample[sampled];
  std::size_t n = 0;
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < gaps; i += stride) sum += sample[n++] = gap(indices, i);
  // Positions that the sample does not cover may be one long gap, which must not be written in unary.
  const std::uint64_t all = std::uint64_t(indices[count - 1] - indices[0]) - gaps, known = sum * stride;
  const std::uint64_t unknown = all > known ? all - known : 0;
  int best = 0;
  std::uint64_t least = ~std::uint64_t(0);
  for (int bits = 0; bits <= most_low_bits; ++bits) {
    std::uint64_t ones = 0;
    for (std::size_t i = 0; i < n; ++i) ones += sample[i] >> bits;
    const std::uint64_t cost = gaps * std::uint64_t(bits) + ones * stride + (unknown >> bits);
    if (cost < least) {
      least = cost;
      best = bits;
    }
  }
  return best;
}

std::size_t coded_room(const std::int32_t* indices, std::size_t count, int bits) {
  if (count < 2) return 0;
  const std::uint64_t span = std::uint64_t(indices[count - 1] - indices[0]);
  return std::size_t(8 * (low_words(count - 1, bits) + most_high_words(count - 1, span, bits) + 1));
}

std::size_t encode_gaps(const std::int32_t* indices, std::size_t count, int bits, char* out) {
  if (count < 2) return 0;
  const std::size_t gaps = count - 1, low_bytes = std::size_t(8 * low_words(gaps, bits));
  BitWriter highs(out + low_bytes);
  std::size_t i = 0;
#if HVS_X86
  if (simd() != Simd::portable) i = encode_groups_avx2(indices, gaps, bits, out, low_bytes, highs);
#endif
  // Groups end at full bytes: the bits of the last, incomplete word are read back.
  const std::size_t place = i * std::size_t(bits), begun = place / 64;
  BitWriter lows(out + 8 * begun);
  if (place % 64) {
    std::uint64_t word = 0;
    std::memcpy(&word, out + 8 * begun, place % 64 / 8);
    lows.append(word, place % 64);
  }
  for (; i < gaps; ++i) {
    const std::uint32_t x = gap(indices, i);
    // Appending writes the current word. Without low bits that would be the first word of the high parts, so nothing is
    // appended.
    if (bits > 0) lows.append(x & ((1u << bits) - 1), std::size_t(bits));
    highs.append_unary(x >> bits);
  }
  if (bits > 0) lows.finish();
  return std::size_t(highs.finish() - out);
}

void decode_gaps(const char* coded, std::size_t bytes, std::size_t count, std::uint32_t first, int bits,
                 std::uint32_t end, std::int32_t* indices) {
  if (bits < 0 || bits > most_low_bits) damaged(std::to_string(bits) + " low bits");
  if (count == 0 || bytes % 8) damaged(std::to_string(bytes) + " bytes for " + std::to_string(count) + " indices");
  const std::size_t gaps = count - 1, low_bytes = std::size_t(8 * low_words(gaps, bits));
  if (gaps == 0 && bytes) damaged(std::to_string(bytes) + " bytes for one index");
  if (first >= end) damaged("index " + std::to_string(first) + " is not below " + std::to_string(end));
  indices[0] = std::int32_t(first);
  if (gaps == 0) return;
  if (bytes <= low_bytes) damaged(std::to_string(bytes) + " bytes for " + std::to_string(count) + " indices");
  const std::size_t words = (bytes - low_bytes) / 8, used = gaps * std::size_t(bits);
  const char* const highs = coded + low_bytes;
  const std::uint64_t last = load_word(highs + 8 * (words - 1));
  if (last == 0) damaged("the high parts are longer than their gaps");
  if (used % 64 && load_word(highs - 8) >> (used % 64)) damaged("bits behind the last low bits");
  std::int32_t ones[64 * chunk + padding + gap_group];
  Decoder decoder = {coded, bytes, bits, first, indices + 1};
  std::size_t listed = 0;
  for (std::size_t w = 0; w < words; w += chunk) {
    std::uint64_t part[chunk];
    const std::size_t n = std::min(chunk, words - w);
    std::memcpy(part, highs + 8 * w, 8 * n);
    listed += list_ones(part, n, 64 * w, ones + listed);
    if (listed > gaps - decoder.done) damaged("the high parts are those of more gaps");
    const std::size_t whole = w + chunk < words ? listed / gap_group * gap_group : listed;
    decoder.run(ones, whole);
    std::copy(ones + whole, ones + listed, ones);  // fewer than a group
    listed -= whole;
  }
  if (decoder.done < gaps) damaged("the high parts are those of fewer gaps");
  const std::uint64_t zeros = 64 * (words - 1) + 63 - std::uint64_t(__builtin_clzll(last)) - (gaps - 1);
  const std::uint64_t index = decoder.sum + (zeros << bits);
  if (index >= end) damaged("index " + std::to_string(index) + " is not below " + std::to_string(end));
}

}  // namespace hvs
