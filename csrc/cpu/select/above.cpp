#include "select/select.hpp"

#include <new>

#include "parallel.hpp"
#include "tiles.hpp"

namespace hvs {
namespace {

// The entries taken by one thread. Their number is not known in advance, so their memory grows; it is reused across
// calls and soon stops growing.
template <class Real> class Piece {
 public:
  Piece(Block& indices, Block& values) : indices_(indices), values_(values) {}

  const Entries<Real>& taken() const { return taken_; }
  bool failed() const { return failed_; }

  // Reserves memory for the entries of one more tile.
  bool make_room() {
    const std::size_t count = taken_.count, room = count + tile_size + padding;
    failed_ = failed_ || !indices_.grow(room, count, taken_.indices) || !values_.grow(room, count, taken_.values);
    return !failed_;
  }

  // Takes `found` more entries, whose indices are already written; the tile is still in the L1 cache.
  void take(std::size_t found, const Tile<Real>& tile, Real scale) {
    const std::size_t end = taken_.count + found;
    for (std::size_t i = taken_.count; i < end; ++i) {
      taken_.values[i] = take_scanned(tile, scale, Key<Real>(0), taken_.indices[i]);
    }
    taken_.count = end;
  }

  // Sweeps begin .. end.
  void sweep(const Step<Real>& step, std::size_t begin, std::size_t end, Key<Real> low) {
    for_each_tile(step, begin, end, [&](const Tile<Real>& tile) {
      if (!make_room()) return accumulate_tile(tile, step.scale);
      take(scan_tile(tile, step.scale, low, low, taken_.indices + taken_.count), tile, step.scale);
    });
  }

 private:
  Block& indices_;
  Block& values_;
  Entries<Real> taken_ = {nullptr, nullptr, 0};
  bool failed_ = false;
};

}  // namespace

template <class Real>
std::vector<Entries<Real>> take_above(const Step<Real>& step, Key<Real> low, std::size_t threads, Workspace& scratch) {
  Block* const blocks = scratch.blocks(2 * threads);
  std::vector<Piece<Real>> pieces;
  for (std::size_t i = 0; i < threads; ++i) pieces.emplace_back(blocks[2 * i], blocks[2 * i + 1]);
  std::vector<Entries<Real>> taken(threads);
  parallel(threads, [&](std::size_t i) {
    pieces[i].sweep(step, part_begin(step.size, i, threads), part_begin(step.size, i + 1, threads), low);
    taken[i] = pieces[i].taken();
  });
  for (const Piece<Real>& piece : pieces) {
    if (!piece.failed()) continue;
    put_back(taken, step.buffer);
    throw std::bad_alloc();
  }
  return taken;
}

template <class Real> void put_back(const std::vector<Entries<Real>>& pieces, Real* buffer) {
  for (const Entries<Real>& piece : pieces) {
    for (std::size_t i = 0; i < piece.count; ++i) buffer[piece.indices[i]] = piece.values[i];
  }
}

template std::vector<Entries<float>> take_above(const Step<float>&, Key<float>, std::size_t, Workspace&);
template std::vector<Entries<double>> take_above(const Step<double>&, Key<double>, std::size_t, Workspace&);
template void put_back(const std::vector<Entries<float>>&, float*);
template void put_back(const std::vector<Entries<double>>&, double*);

}  // namespace hvs
