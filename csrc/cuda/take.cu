// Moving given positions out of a buffer: 12 bytes for each of them, 8 where all are taken.
#include "segments.cuh"

namespace hvs {

// values <- buffer at `taken` ascending positions (null: at 0 .. taken), which becomes zero there. Positions that no
// segment covers are held: they stay, and their value is zero.
template <class Real>
__global__ void take(const Segment* segments, int count, const std::int32_t* positions, std::int64_t taken, Real* buffer,
                     std::int64_t size, Real* values) {
  const std::int64_t stride = std::int64_t(gridDim.x) * blockDim.x;
  for (std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < taken; i += stride) {
    const std::int64_t at = positions ? positions[i] : i;
    Real value = 0;
    if (at >= 0 && at < size) {
      const int s = first_behind(segments, count, at);
      if (s < count && segments[s].start <= at) {
        value = buffer[at];
        buffer[at] = 0;
      }
    }
    values[i] = value;
  }
}

}  // namespace hvs
