// Codes of indices as gaps, with low bits and high parts stored separately, so that neither is read bit by bit; and
// codes of values as levels. ../common/coding.hpp holds what the devices share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/coding.hpp"

namespace hvs {

constexpr int most_low_bits = 24;  // so that eight of them fit in two loads of 16 bytes

// The number of low bits that makes the code shortest, estimated from a sample of the gaps.
int choose_low_bits(const std::int32_t* indices, std::size_t count);

// Upper bound of the bytes that encode_gaps writes.
std::size_t coded_room(const std::int32_t* indices, std::size_t count, int bits);

// Writes the gaps between ascending indices; returns the number of bytes, a multiple of 8.
std::size_t encode_gaps(const std::int32_t* indices, std::size_t count, int bits, char* out);

// Reads the gaps of `count` indices, the first of which is `first`. Throws std::invalid_argument if the bytes are not
// such a code or an index is not below `end`; `indices` is then undefined. Never accesses memory outside the arrays.
void decode_gaps(const char* coded, std::size_t bytes, std::size_t count, std::uint32_t first, int bits,
                 std::uint32_t end, std::int32_t* indices);

// The loops over full groups of 8 gaps, per SIMD level. The portable loops do the rest: incomplete groups, and groups
// too close to the end of the memory.
constexpr std::size_t gap_group = 8;

// Writes bits contiguously, from the lowest bit of each word on.
class BitWriter {
 public:
  explicit BitWriter(char* out) : out_(out) {}

  // Appends `length` <= 64 bits; the bits above must be zero. Also writes the word after the full ones.
  void append(std::uint64_t bits, std::size_t length) {
    word_ |= bits << fill_;
    __builtin_memcpy(out_, &word_, sizeof word_);
    const std::size_t fill = fill_ + length;
    const bool full = fill >= 64;
    word_ = full ? (bits >> 1) >> (63 - fill_) : word_;
    out_ += full ? 8 : 0;
    fill_ = fill % 64;
  }

  // Appends a number in unary: that many zeros, and a one.
  void append_unary(std::uint32_t number) {
    for (; number >= 63; number -= 63) append(0, 63);
    append(std::uint64_t(1) << number, number + 1);
  }

  // Completes the last word; returns its end.
  char* finish() {
    if (fill_ == 0) return out_;
    __builtin_memcpy(out_, &word_, sizeof word_);
    return out_ + 8;
  }

 private:
  char* out_;
  std::uint64_t word_ = 0;
  std::size_t fill_ = 0;
};

// Encodes the gaps before indices[1 .. 1 + gaps]; returns the number encoded, a multiple of 8. `lows` has `low_bytes`.
std::size_t encode_groups_avx2(const std::int32_t* indices, std::size_t gaps, int bits, char* lows,
                               std::size_t low_bytes, BitWriter& highs);

// Writes first + i for each bit i that is set in the words, and up to 8 more numbers. Returns the number of set bits.
std::size_t list_ones_avx2(const std::uint64_t* words, std::size_t count, std::size_t first, std::int32_t* ones);

// Decodes up to `gaps` gaps from number `from` on, a multiple of 8; returns the number decoded. Each gap adds its low
// bits and one to `sum`. Its index is `sum` plus 2^bits for each zero before its one, which is at ones[i]. `lows` has
// `readable` bytes.
std::size_t decode_groups_avx2(const char* lows, std::size_t readable, int bits, std::size_t from, std::size_t gaps,
                               const std::int32_t* ones, std::uint64_t& sum, std::int32_t* indices);

// --- values --------------------------------------------------------------------------------------------------------

constexpr std::int32_t least_shift = 16, most_shift = 23;

// The smallest and the largest key of the finite nonzero values; 0 and 0 if there are none.
template <class Real> void key_range(const Real* values, std::size_t count, std::int32_t& low, std::int32_t& high);

// Splits values into values of levels and the rest; their sums are exactly the values.
template <class Real>
void round_to_levels(const Real* values, std::size_t count, const Levels& levels, Real* rounded, Real* rest);

// Writes codes of 8 bits, or two codes of 4 bits per byte, the first in its lower half.
template <class Real>
void encode_levels(const Real* values, std::size_t count, const Levels& levels, int bits, std::uint8_t* codes);

template <class Real>
void decode_levels(const std::uint8_t* codes, std::size_t count, const Levels& levels, int bits, Real* values);

}  // namespace hvs
