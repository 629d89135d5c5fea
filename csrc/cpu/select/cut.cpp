// cut: finds the k-th largest magnitude in a copy of the keys, then distributes the entries in one pass.
#include <algorithm>

#include "select/rank.hpp"
#include "select/select.hpp"
#include "workspace.hpp"

namespace hvs {

template <class Real>
void cut(const Sparse<Real>& vector, std::size_t k, Entries<Real>& largest, Entries<Real>& rest) {
  Cut<Key<Real>> at = {largest_key<Real>, 0};
  if (k > 0) {
    Lease scratch(workspaces());
    auto* const keys = (*scratch).template get<Key<Real>>(0, vector.count);
    std::transform(vector.values, vector.values + vector.count, keys, magnitude<Real>);
    at = cut_at(keys, vector.count, k, Key<Real>(0), largest_key<Real>);
  }
  for (std::size_t i = 0; i < vector.count; ++i) {
    const Key<Real> key = magnitude(vector.values[i]);
    const bool tie = key == at.threshold && at.ties > 0;
    const bool taken = key > at.threshold || tie;
    at.ties -= tie;
    // Writes both and keeps one: which one cannot be predicted by a branch.
    largest.indices[largest.count] = rest.indices[rest.count] = vector.indices[i];
    largest.values[largest.count] = rest.values[rest.count] = vector.values[i];
    largest.count += taken;
    rest.count += !taken;
  }
}

template void cut(const Sparse<float>&, std::size_t, Entries<float>&, Entries<float>&);
template void cut(const Sparse<double>&, std::size_t, Entries<double>&, Entries<double>&);

}  // namespace hvs
