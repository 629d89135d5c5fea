// Scratch memory that is reused across calls: fresh pages would cost a page fault each in every call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace hvs {

// A growing block of uninitialised memory. get() discards its content when it grows.
class Block {
 public:
  template <class T> T* get(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    if (bytes > capacity_) {
      bytes_.reset();
      capacity_ = 0;
      bytes_.reset(allocate(bytes));
      if (!bytes_) throw std::bad_alloc();
      capacity_ = bytes;
    }
    return reinterpret_cast<T*>(bytes_.get());
  }
  // Like get(), but keeps the first `kept` elements, and at least doubles the block when it grows. If memory runs out,
  // returns false instead of throwing and keeps all elements.
  template <class T> bool grow(std::size_t count, std::size_t kept, T*& elements) {
    std::size_t bytes = count * sizeof(T);
    if (bytes > capacity_) {
      bytes = std::max(bytes, 2 * capacity_);
      Bytes larger(allocate(bytes));
      if (!larger) return false;
      std::copy_n(bytes_.get(), kept * sizeof(T), larger.get());
      bytes_ = std::move(larger);
      capacity_ = bytes;
    }
    elements = reinterpret_cast<T*>(bytes_.get());
    return true;
  }
  std::size_t capacity() const { return capacity_; }

 private:
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  using Bytes = std::unique_ptr<std::byte[], Free>;

  // malloc instead of new (std::nothrow), which throws and catches internally: a thread's first exception needs memory
  // too, and the process aborts if there is none.
  static std::byte* allocate(std::size_t bytes) { return static_cast<std::byte*>(std::malloc(bytes)); }

  Bytes bytes_;
  std::size_t capacity_ = 0;
};

// The blocks of one call; the caller decides what each number is used for.
class Workspace {
 public:
  template <class T> T* get(std::size_t number, std::size_t count) { return blocks(number + 1)[number].get<T>(count); }

  // The first `count` blocks. The pointer stays valid until more blocks are requested.
  Block* blocks(std::size_t count) {
    if (count > blocks_.size()) blocks_.resize(count);
    return blocks_.data();
  }
  std::size_t capacity() const {
    std::size_t total = 0;
    for (const Block& block : blocks_) total += block.capacity();
    return total;
  }

 private:
  std::vector<Block> blocks_;
};

// The workspaces that are not in use. Concurrent calls (one per Python thread) get different ones.
class WorkspacePool {
 public:
  static constexpr std::size_t most_retained = std::size_t(64) << 20;  // bytes

  std::unique_ptr<Workspace> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<Workspace>();
    std::unique_ptr<Workspace> workspace = std::move(idle_.back());
    idle_.pop_back();
    return workspace;
  }
  void put(std::unique_ptr<Workspace> workspace) {
    if (workspace->capacity() > most_retained) return;  // in a call that large, page faults are negligible
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(workspace));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> idle_;
};

// A workspace for the lifetime of this object.
class Lease {
 public:
  explicit Lease(WorkspacePool& pool) : pool_(pool), workspace_(pool.take()) {}
  ~Lease() { pool_.put(std::move(workspace_)); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  Workspace& operator*() { return *workspace_; }

 private:
  WorkspacePool& pool_;
  std::unique_ptr<Workspace> workspace_;
};

inline WorkspacePool& workspaces() {
  static WorkspacePool pool;
  return pool;
}

}  // namespace hvs
