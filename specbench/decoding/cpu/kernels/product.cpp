// Products of a few tokens with a large matrix, which take as long as the matrix takes to be read.
//
// The matrix lies in panels of PANEL rows. Within a panel a vector of each row follows that of the row before, so that
// memory is read from its first byte to its last. An output is one chain of sums over the columns, LANES of them side
// by side, whatever is computed beside it: other tokens, other rows, other threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "kernels.h"
#include "simd.h"

namespace {

constexpr int64_t PANEL = REGISTERS == 32 ? 4 : 2;
constexpr int64_t TOKENS = 6;        // at a time: their sums and states fill the registers
constexpr int64_t STREAMS = 3;       // that are read side by side for one or two tokens: memory gives more than for one
constexpr int64_t AHEAD = 2048;      // bytes between what is read and what is fetched, where one stream is read
constexpr int64_t THREAD = 1 << 16;  // numbers of a matrix that are worth a thread

// The outputs [T, P, PANEL] of T tokens, whose states lie `stride` floats apart, and of P panels of `size` numbers each,
// which lie `apart` numbers from one another.
template <int T, int P, class W>
void sums(const W* weights, int64_t size, int64_t apart, const float* states, int64_t stride, float* outputs) {
  constexpr int V = VECTORS<W>;
  Floats total[P][PANEL][T] = {};
  for (int64_t done = 0; done < size; done += PANEL * BLOCK<W>, states += BLOCK<W>) {
    if constexpr (P == 1) __builtin_prefetch(reinterpret_cast<const char*>(weights + done) + AHEAD);
    Floats state[T][V];
    for (int t = 0; t < T; t++)
      for (int v = 0; v < V; v++) state[t][v] = load<Floats>(states + t * stride + v * LANES);
    for (int p = 0; p < P; p++)
      for (int r = 0; r < PANEL; r++) {
        Floats weight[V];
        load_block(weights + p * apart + done + r * BLOCK<W>, weight);
        for (int t = 0; t < T; t++)
          for (int v = 0; v < V; v++) total[p][r][t] = fma(weight[v], state[t][v], total[p][r][t]);
      }
  }
  for (int t = 0; t < T; t++)
    for (int p = 0; p < P; p++)
      for (int r = 0; r < PANEL; r++) *outputs++ = sum(total[p][r][t]);
}

// `sums` of one panel and of as many tokens as there are.
template <int T, class W>
void one_panel(int64_t tokens, const W* weights, int64_t size, const float* states, int64_t stride, float* outputs) {
  if (tokens == T)
    sums<T, 1>(weights, size, 0, states, stride, outputs);
  else if constexpr (T > 1)
    one_panel<T - 1>(tokens, weights, size, states, stride, outputs);
}

inline float rounded(float number, float) { return number; }
inline c10::BFloat16 rounded(float number, c10::BFloat16) { return c10::BFloat16(number); }

template <class W, class T>
void multiply(const W* weights, int64_t panels, int64_t size, const float* states, int64_t stride, int64_t tokens,
              const float* bias, int64_t rows, T* outputs) {
  at::parallel_for(0, panels, std::max<int64_t>(1, THREAD / size), [&](int64_t begin, int64_t end) {
    float buffer[TOKENS * PANEL];
    auto write = [&](const float* from, int64_t token, int64_t panel) {
      for (int64_t row = panel * PANEL, last = std::min(row + PANEL, rows); row < last; row++)
        outputs[token * rows + row] = rounded(*from++ + (bias == nullptr ? 0.0f : bias[row]), T());
    };
    int64_t panel = begin, apart = tokens <= 2 ? (end - begin) / STREAMS : 0;
    for (; panel < begin + apart; panel++) {
      if (tokens == 1)
        sums<1, STREAMS>(weights + panel * size, size, apart * size, states, stride, buffer);
      else
        sums<2, STREAMS>(weights + panel * size, size, apart * size, states, stride, buffer);
      for (int64_t t = 0; t < tokens; t++)
        for (int64_t stream = 0; stream < STREAMS; stream++)
          write(buffer + (t * STREAMS + stream) * PANEL, t, panel + stream * apart);
    }
    for (panel = begin + STREAMS * apart; panel < end; panel++)
      for (int64_t token = 0; token < tokens; token += TOKENS) {
        int64_t now = std::min(TOKENS, tokens - token);
        one_panel<TOKENS>(now, weights + panel * size, size, states + token * stride, stride, buffer);
        for (int64_t t = 0; t < now; t++) write(buffer + t * PANEL, token + t, panel);
      }
  });
}

// States [tokens, columns] as floats, filled up to `stride` columns with zeros.
at::Tensor as_floats(const at::Tensor& states, int64_t tokens, int64_t columns, int64_t stride) {
  at::Tensor contiguous = states.contiguous();
  bool floats = states.scalar_type() == at::kFloat;
  if (floats && stride == columns) return contiguous;
  at::Tensor filled = at::empty({tokens, stride}, states.options().dtype(at::kFloat));
  float* to = filled.mutable_data_ptr<float>();
  for (int64_t t = 0; t < tokens; t++, to += stride) {
    if (floats)
      std::copy_n(contiguous.const_data_ptr<float>() + t * columns, columns, to);
    else
      std::copy_n(contiguous.const_data_ptr<c10::BFloat16>() + t * columns, columns, to);
    std::fill(to + columns, to + stride, 0.0f);
  }
  return filled;
}

}  // namespace

at::Tensor specbench::product(const at::Tensor& states, const at::Tensor& panels,
                              const std::optional<at::Tensor>& bias, int64_t rows) {
  int64_t columns = states.size(-1), tokens = states.numel() / columns;
  int64_t size = panels.size(1), stride = size / PANEL;
  auto shape = states.sizes().vec();
  shape.back() = rows;
  at::Tensor outputs = at::empty(shape, states.options());
  at::Tensor floats = as_floats(states, tokens, columns, stride);
  at::Tensor summand = bias.has_value() ? bias->to(at::kFloat).contiguous() : at::Tensor();
  const float* added = bias.has_value() ? summand.const_data_ptr<float>() : nullptr;
  const float* from = floats.const_data_ptr<float>();
  if (states.scalar_type() == at::kFloat)
    multiply(panels.const_data_ptr<float>(), panels.size(0), size, from, stride, tokens, added, rows,
             outputs.mutable_data_ptr<float>());
  else
    multiply(reinterpret_cast<const uint16_t*>(panels.const_data_ptr<c10::BFloat16>()), panels.size(0), size, from,
             stride, tokens, added, rows, outputs.mutable_data_ptr<c10::BFloat16>());
  return outputs;
}

TORCH_LIBRARY_FRAGMENT(specbench, library) {
  library.def("product(Tensor states, Tensor panels, Tensor? bias, int rows) -> Tensor");
  library.def("panel() -> int", [] { return PANEL; });
  library.def("lanes() -> int", [] { return int64_t(LANES); });
}
TORCH_LIBRARY_IMPL(specbench, CPU, library) { library.impl("product", specbench::product); }
