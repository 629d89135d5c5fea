// Positions as gaps, whose low bits and high parts are apart, so that neither has to be read bit by bit; and values as
// levels. ../common/coding.hpp has what the devices share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/coding.hpp"

namespace hvs {

constexpr int most_low_bits = 24;  // so that eight of them are in two loads of 16 bytes

// The number of low bits that makes the code shortest, as far as a sample of the gaps tells.
int choose_low_bits(const std::int32_t* indices, std::size_t count);

// Bytes that encode_gaps may write.
std::size_t coded_room(const std::int32_t* indices, std::size_t count, int bits);

// Writes the gaps between ascending indices; returns the bytes, a multiple of 8.
std::size_t encode_gaps(const std::int32_t* indices, std::size_t count, int bits, char* out);

// Reads the gaps of `count` indices, of which `first` is the first. Throws std::invalid_argument where the bytes are no
// such code, or an index is not below `end`; what is in `indices` then has no meaning. Memory beside is not touched.
void decode_gaps(const char* coded, std::size_t bytes, std::size_t count, std::uint32_t first, int bits,
                 std::uint32_t end, std::int32_t* indices);

// The loops over whole groups of 8 gaps, per SIMD level. Both leave what does not fill a group, or lies too close to
// the end of the memory, to the portable loops.
constexpr std::size_t gap_group = 8;

// Bits that are written one after another, from the lowest of each word on.
class BitWriter {
 public:
  explicit BitWriter(char* out) : out_(out) {}

  // Up to 64 bits; those above `length` are zero. Writes a word behind what is full.
  void append(std::uint64_t bits, std::size_t length) {
    word_ |= bits << fill_;
    __builtin_memcpy(out_, &word_, sizeof word_);
    const std::size_t fill = fill_ + length;
    const bool full = fill >= 64;
    word_ = full ? (bits >> 1) >> (63 - fill_) : word_;
    out_ += full ? 8 : 0;
    fill_ = fill % 64;
  }

  // A number in unary: as many zeros, and a one.
  void append_unary(std::uint32_t number) {
    for (; number >= 63; number -= 63) append(0, 63);
    append(std::uint64_t(1) << number, number + 1);
  }

  // Fills the last word; where it ends.
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

// Encodes the gaps in front of indices[1 .. 1 + gaps]; returns how many, a multiple of 8. `lows` has room for
// `low_bytes`.
std::size_t encode_groups_avx2(const std::int32_t* indices, std::size_t gaps, int bits, char* lows,
                               std::size_t low_bytes, BitWriter& highs);

// Writes first + i for each bit i that is set in the words, and up to 8 numbers behind. Returns how many.
std::size_t list_ones_avx2(const std::uint64_t* words, std::size_t count, std::size_t first, std::int32_t* ones);

// Gap number i adds its low bits and one to `sum`, and its index is `sum` plus the zeros in front of its one, each of
// them 2^bits: ones[i] is where this one is, the first gap's number is `from`, a multiple of 8. Returns how many gaps
// were done, of `gaps`. `readable` bytes are behind `lows`.
std::size_t decode_groups_avx2(const char* lows, std::size_t readable, int bits, std::size_t from, std::size_t gaps,
                               const std::int32_t* ones, std::uint64_t& sum, std::int32_t* indices);

// --- values --------------------------------------------------------------------------------------------------------

constexpr std::int32_t least_shift = 16, most_shift = 23;

// The least and the largest key of what is finite and not zero; 0 and 0 where there is nothing.
template <class Real> void key_range(const Real* values, std::size_t count, std::int32_t& low, std::int32_t& high);

// Parts values into those that codes stand for and the rest; their sums are exactly the values.
template <class Real>
void round_to_levels(const Real* values, std::size_t count, const Levels& levels, Real* rounded, Real* rest);

// Codes of 8 bits, or two of 4 bits in a byte, the first in its lower half.
template <class Real>
void encode_levels(const Real* values, std::size_t count, const Levels& levels, int bits, std::uint8_t* codes);

template <class Real>
void decode_levels(const std::uint8_t* codes, std::size_t count, const Levels& levels, int bits, Real* values);

}  // namespace hvs
