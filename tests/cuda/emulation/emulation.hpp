// Runs CUDA kernels on the CPU, one fiber per thread and one block after another, so that they can be tested without a
// GPU. Included in front of a .cu file that is compiled as C++.
//
// A block whose threads meet different barriers, or whose warps meet different collectives, ends the process with a
// message. Memory ordering between blocks is not emulated: a missing __threadfence() or atomic goes unnoticed.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulation {

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated kernel: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
  std::abort();
}

// What a warp collects in one of its collectives; the next one begins when all lanes have read the results.
struct Warp {
  unsigned mask = 0, arrived = 0, left = 0;
  int operation = 0;
  std::uint64_t values[32];
};

// Begun with ucontext, then switched by _setjmp and _longjmp, which make no system call. It goes on to the next block,
// so that it begins once.
struct Fiber {
  jmp_buf here;
  std::unique_ptr<char[]> stack;
  bool begun = false;
  bool done;
  int barrier;  // the line of the barrier at which it waits; 0: none
};

constexpr std::size_t stack_bytes = 128 << 10;

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline jmp_buf scheduler;
inline unsigned current;
inline void (*body)(void**);
inline void** arguments;

__attribute__((noinline)) inline void yield() {
  if (_setjmp(fibers[current].here) == 0) _longjmp(scheduler, 1);
}

inline void enter() {
  for (;;) {
    body(arguments);
    fibers[current].done = true;
    yield();
  }
}

inline void barrier(int line) {
  fibers[current].barrier = line;
  while (fibers[current].barrier != 0) yield();
}

inline unsigned lane() { return threadIdx.x % 32; }

// Every lane of the mask gives a value; returns when all have, with everybody's in the warp.
inline Warp& meet(int operation, unsigned mask, std::uint64_t value) {
  Warp& warp = warps[threadIdx.x / 32];
  const unsigned me = 1u << lane();
  if (!(mask & me)) fail("a lane is not in the mask of its own collective");
  while (warp.left != 0 || (warp.arrived & me)) yield();  // the last collective is not over
  if (warp.arrived == 0) {
    warp.mask = mask;
    warp.operation = operation;
  }
  if (warp.mask != mask || warp.operation != operation) fail("lanes of a warp meet different collectives");
  warp.values[lane()] = value;
  warp.arrived |= me;
  while (warp.arrived != warp.mask) yield();
  return warp;
}

inline void leave(Warp& warp) {
  warp.left |= 1u << lane();
  if (warp.left == warp.mask) warp.left = warp.arrived = 0;
}

template <class T> std::uint64_t pack(T value) {
  static_assert(sizeof(T) <= 8, "");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T> T unpack(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T> T shuffle(int operation, unsigned mask, T value, unsigned from) {
  Warp& warp = meet(operation, mask, pack(value));
  const T result = from < 32 && (mask >> from & 1) ? unpack<T>(warp.values[from]) : value;
  leave(warp);
  return result;
}

inline unsigned ballot(int operation, unsigned mask, bool predicate) {
  Warp& warp = meet(operation, mask, predicate);
  unsigned result = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if (mask >> i & 1) result |= unsigned(warp.values[i] != 0) << i;
  }
  leave(warp);
  return result;
}

template <class T> unsigned match_any(int operation, unsigned mask, T value) {
  Warp& warp = meet(operation, mask, pack(value));
  unsigned result = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if (mask >> i & 1) result |= unsigned(warp.values[i] == pack(value)) << i;
  }
  leave(warp);
  return result;
}

inline void begin(Fiber& fiber) {
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = stack_bytes;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  fiber.begun = true;
  setcontext(&context);
}

// Gives way to one fiber.
__attribute__((noinline)) inline void resume(unsigned thread) {
  current = thread;
  threadIdx.x = thread;
  if (_setjmp(scheduler) != 0) return;
  if (fibers[thread].begun) _longjmp(fibers[thread].here, 1);
  begin(fibers[thread]);
}

inline void run_block(bool backwards) {
  const unsigned threads = blockDim.x;
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.done = false;
    fiber.barrier = 0;
  }
  for (Warp& warp : warps) warp = Warp();
  // Rounds in which nobody comes further would go on for ever; a warp's collective needs at most a few.
  for (unsigned idle = 0;;) {
    unsigned done = 0, waiting = 0, line = 0;
    for (unsigned i = 0; i < threads; ++i) {
      const unsigned thread = backwards ? threads - 1 - i : i;
      Fiber& fiber = fibers[thread];
      if (!fiber.done && fiber.barrier == 0) resume(thread);
      done += fiber.done;
      waiting += fiber.barrier != 0;
      if (fiber.barrier != 0) line = unsigned(fiber.barrier);
    }
    if (done == threads) return;
    if (done + waiting < threads) {
      if (++idle > 100000) fail("threads wait for each other for ever");
      continue;
    }
    idle = 0;
    if (done > 0) fail("some threads have returned while others wait at a barrier");
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].barrier != int(line)) fail("threads wait at different barriers");
    }
    for (unsigned i = 0; i < threads; ++i) fibers[i].barrier = 0;
  }
}

inline void launch(void (*kernel)(void**), unsigned grid, unsigned block, void** args) {
  body = kernel;
  arguments = args;
  gridDim.x = grid;
  blockDim.x = block;
  while (fibers.size() < block) {
    fibers.emplace_back();
    fibers.back().stack.reset(new char[stack_bytes]);
  }
  warps.resize((block + 31) / 32);
  for (unsigned b = 0; b < grid; ++b) {
    blockIdx.x = b;
    run_block(b % 2);
  }
}

template <auto kernel> struct Thunk;
template <class... T, void (*kernel)(T...)> struct Thunk<kernel> {
  template <std::size_t... i> static void call(void** args, std::index_sequence<i...>) {
    kernel(*static_cast<std::remove_reference_t<T>*>(args[i])...);
  }
  static void run(void** args) { call(args, std::index_sequence_for<T...>()); }
  static constexpr int count = sizeof...(T);
};

template <class... T, class Visit> void sizes_of(void (*)(T...), Visit visit) { (visit(sizeof(T)), ...); }

struct Entry {
  const char* name;
  void (*run)(void**);
  int count;
  void (*sizes)(int*);
};

template <auto kernel> constexpr Entry entry(const char* name) {
  return {name, Thunk<kernel>::run, Thunk<kernel>::count, [](int* sizes) {
            sizes_of(kernel, [&](std::size_t bytes) { *sizes++ = int(bytes); });
          }};
}

}  // namespace emulation

#define __syncthreads() emulation::barrier(__LINE__)
#define __syncwarp(...) ((void)emulation::ballot(__LINE__, 0xffffffffu, true))
#define __ballot_sync(mask, predicate) emulation::ballot(__LINE__, mask, predicate)
#define __any_sync(mask, predicate) (emulation::ballot(__LINE__, mask, predicate) != 0)
#define __all_sync(mask, predicate) (emulation::ballot(__LINE__, mask, !(predicate)) == 0)
#define __match_any_sync(mask, value) emulation::match_any(__LINE__, mask, value)
#define __shfl_sync(mask, value, from) emulation::shuffle(__LINE__, mask, value, unsigned(from))
#define __shfl_up_sync(mask, value, by) emulation::shuffle(__LINE__, mask, value, emulation::lane() - unsigned(by))
#define __shfl_down_sync(mask, value, by) emulation::shuffle(__LINE__, mask, value, emulation::lane() + unsigned(by))
#define __shfl_xor_sync(mask, value, bits) emulation::shuffle(__LINE__, mask, value, emulation::lane() ^ unsigned(bits))

inline void __threadfence() {}
inline void __nanosleep(unsigned) {}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T> T __ldg(const T* p) { return *p; }

template <class T, class U> T atomicAdd(T* p, U x) {
  const T old = *p;
  *p = T(old + T(x));
  return old;
}
template <class T, class U> T atomicOr(T* p, U x) {
  const T old = *p;
  *p = T(old | T(x));
  return old;
}
template <class T, class U> T atomicMax(T* p, U x) {
  const T old = *p;
  *p = old < T(x) ? T(x) : old;
  return old;
}
template <class T, class U> T atomicMin(T* p, U x) {
  const T old = *p;
  *p = T(x) < old ? T(x) : old;
  return old;
}
template <class T, class U> T atomicExch(T* p, U x) {
  const T old = *p;
  *p = T(x);
  return old;
}

template <class T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T max(T a, T b) { return a < b ? b : a; }
