// Work on several threads, split by position so that results do not depend on their number.
#pragma once

#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

namespace hvs {

// Calls work(part) for part = 0 .. parts - 1 at the same time, the last one on the calling thread. work must not throw.
template <class Work> void parallel(std::size_t parts, const Work& work) {
  std::vector<std::thread> threads;
  threads.reserve(parts);
  std::size_t next = 0;
  try {
    for (; next + 1 < parts; ++next) threads.emplace_back([&work, next] { work(next); });
  } catch (const std::exception&) {
    // The system gives no more threads: the calling thread does what is left.
  }
  for (; next < parts; ++next) work(next);
  for (std::thread& thread : threads) thread.join();
}

// Where part `part` of `parts` begins in 0 .. size; multiples of 64 keep cache lines to one thread.
inline std::size_t part_begin(std::size_t size, std::size_t part, std::size_t parts) {
  return part == parts ? size : size / parts * part / 64 * 64;
}

}  // namespace hvs
