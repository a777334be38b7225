// The likeliest token of each row of logits, the first one of several: as NumPy's argmax, which knows no bfloat16.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace {

constexpr int64_t GRAIN = 1 << 16;  // numbers that are worth a thread
constexpr float LEAST = -std::numeric_limits<float>::infinity();

inline float number(float from) { return from; }
inline float number(uint16_t from) {
  uint32_t bits = uint32_t(from) << 16;
  float to;
  std::memcpy(&to, &bits, sizeof to);
  return to;
}

template <class T>
int64_t argmax(const T* row, int64_t size) {
  constexpr int V = VECTORS<T>;
  Floats greatest[V];
  Integers block[V] = {}, missing = {};  // the first block that has the greatest; whether there was a NaN
  for (int v = 0; v < V; v++) greatest[v] = broadcast(LEAST);
  int64_t i = 0;
  for (; i + BLOCK<T> <= size; i += BLOCK<T>)
    for (int v = 0; v < V; v++) {
      Floats some = load_vector(row + i, v);
      Integers higher = some > greatest[v];
      greatest[v] = higher ? some : greatest[v];
      block[v] = higher ? int32_t(i) - Integers{} : block[v];
      missing |= some != some;
    }
  float best = LEAST;
  int64_t token = 0;
  bool has_nan = false;
  for (int v = 0; v < V; v++)
    for (int lane = 0; lane < LANES; lane++) {
      const int64_t at = block[v][lane] + lane * V + v;
      if (greatest[v][lane] > best || (greatest[v][lane] == best && best > LEAST && at < token))
        best = greatest[v][lane], token = at;
      has_nan = has_nan || missing[lane] != 0;
    }
  for (; i < size; i++) {
    const float one = number(row[i]);
    if (one > best) best = one, token = i;
    has_nan = has_nan || one != one;
  }
  if (!has_nan) return token;
  return std::find_if(row, row + size, [](T one) { return number(one) != number(one); }) - row;
}

template <class T>
void argmax_of(const T* logits, int64_t rows, int64_t size, int64_t* tokens) {
  specbench::use_threads_of_torch();
  at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) tokens[row] = argmax(logits + row * size, size);
  });
}

// Logits [..., vocab] -> tokens [...].
at::Tensor argmax_token(const at::Tensor& logits) {
  TORCH_CHECK(logits.dim() > 0 && logits.size(-1) > 0, "argmax: logits without tokens");
  at::Tensor contiguous = logits.contiguous();
  const int64_t size = logits.size(-1), rows = logits.numel() / size;
  at::Tensor tokens = at::empty(logits.sizes().slice(0, logits.dim() - 1), logits.options().dtype(at::kLong));
  int64_t* to = tokens.mutable_data_ptr<int64_t>();
  if (logits.scalar_type() == at::kFloat) {
    argmax_of(contiguous.const_data_ptr<float>(), rows, size, to);
  } else {
    TORCH_CHECK(logits.scalar_type() == at::kBFloat16, "argmax: float32 or bfloat16");
    argmax_of(reinterpret_cast<const uint16_t*>(contiguous.const_data_ptr<c10::BFloat16>()), rows, size, to);
  }
  return tokens;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specbench, m) { m.def("argmax(Tensor logits) -> Tensor"); }
TORCH_LIBRARY_IMPL(specbench, CPU, m) { m.impl("argmax", argmax_token); }
