// Multithreaded work, split by position so that results do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

namespace hvs {

// Calls work(part) for part = 0 .. parts - 1 concurrently, the last one on the calling thread. work must not throw.
template <class Work> void parallel(std::size_t parts, const Work& work) {
  std::vector<std::thread> threads;
  threads.reserve(parts);
  std::size_t next = 0;
  try {
    for (; next + 1 < parts; ++next) threads.emplace_back([&work, next] { work(next); });
  } catch (const std::exception&) {
    // No more threads are available: the calling thread does the remaining parts.
  }
  for (; next < parts; ++next) work(next);
  for (std::thread& thread : threads) thread.join();
}

// The begin of part `part` of `parts` in 0 .. size. Multiples of 64 keep each cache line in the part of one thread.
inline std::size_t part_begin(std::size_t size, std::size_t part, std::size_t parts) {
  return part == parts ? size : size / parts * part / 64 * 64;
}

}  // namespace hvs
