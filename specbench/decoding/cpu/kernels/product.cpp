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
constexpr int64_t TOKENS = 6;        // of a group: their sums and states fill the registers
constexpr int64_t SET = 4;           // panels that every group goes through before the next ones are read
constexpr int64_t STREAMS = 3;       // that are read side by side for one or two tokens: memory gives more than for one
constexpr int64_t LINE = 64;         // bytes
constexpr int64_t LINES = PANEL * LANES * sizeof(float) / LINE;  // of a panel that a step reads
constexpr int64_t AHEAD = 8192;      // bytes between what is read and what is fetched into the L2 cache, for one group
constexpr int64_t NEAR = 1024;       // the same of the L1 cache
constexpr int64_t THREAD = 1 << 16;  // numbers of a matrix that are worth a thread

template <class W>
inline const char* bytes(const W* weights) { return reinterpret_cast<const char*>(weights); }
template <class W>
inline const char* ahead(const W* weights) { return bytes(weights) + AHEAD; }

// The outputs [P, T, PANEL], filled up to a multiple of four, of T tokens, whose states lie `stride` floats apart, and of
// P panels of `size` numbers each, which lie `apart` numbers from one another. Meanwhile it fetches F lines in each step,
// from `fetched` on, and as many for each other panel.
template <int T, int P, int F, class W>
void sums(const W* weights, int64_t size, int64_t apart, const char* fetched, const float* states, int64_t stride,
          float* outputs) {
  constexpr int V = VECTORS<W>, COUNT = P * T * PANEL;
  Floats total[(COUNT + 3) / 4 * 4] = {};
  for (int64_t done = 0; done < size; done += PANEL * BLOCK<W>, states += BLOCK<W>, fetched += F * LINE) {
    for (int p = 0; p < P; p++)
      for (int line = 0; line < F; line++) __builtin_prefetch(fetched + p * apart * sizeof(W) + line * LINE, 0, 2);
    for (int line = 0; P == 1 && line < LINES; line++) __builtin_prefetch(bytes(weights + done) + NEAR + line * LINE);
    Floats state[T][V];
    for (int t = 0; t < T; t++)
      for (int v = 0; v < V; v++) state[t][v] = load<Floats>(states + t * stride + v * LANES);
    for (int p = 0; p < P; p++)
      for (int r = 0; r < PANEL; r++) {
        Floats weight[V];
        load_block(weights + p * apart + done + r * BLOCK<W>, weight);
        for (int t = 0; t < T; t++)
          for (int v = 0; v < V; v++) {
            Floats& sum = total[(p * T + t) * PANEL + r];
            sum = fma(weight[v], state[t][v], sum);
          }
      }
  }
  UNROLLED for (int i = 0; i < COUNT; i += 4) {
    Quad four = lane_sums(total + i);
    std::memcpy(outputs + i, &four, sizeof four);
  }
}

// `sums` of one panel, for as many tokens and lines as there are.
template <int T, int F, class W>
void one_panel(int64_t tokens, int64_t lines, const W* weights, int64_t size, const char* fetched, const float* states,
               int64_t stride, float* outputs) {
  if constexpr (T > 1)
    if (tokens < T) return one_panel<T - 1, F>(tokens, lines, weights, size, fetched, states, stride, outputs);
  if constexpr (F > 0)
    if (lines < F) return one_panel<T, F / 2>(tokens, lines, weights, size, fetched, states, stride, outputs);
  sums<T, 1, F>(weights, size, 0, fetched, states, stride, outputs);
}

// How many of a step's lines the first groups have fetched.
inline int64_t shared(int64_t first, int64_t groups) { return (LINES * first + groups - 1) / groups; }

inline float rounded(float number, float) { return number; }
inline c10::BFloat16 rounded(float number, c10::BFloat16) { return c10::BFloat16(number); }

template <class W, class T>
void multiply(const W* weights, int64_t panels, int64_t size, const float* states, int64_t stride, int64_t tokens,
              const float* bias, int64_t rows, T* outputs) {
  const int64_t groups = (tokens + TOKENS - 1) / TOKENS;
  at::parallel_for(0, panels, std::max<int64_t>(1, THREAD / size), [&](int64_t begin, int64_t end) {
    float buffer[std::max(TOKENS, 2 * STREAMS) * PANEL];
    auto write = [&](const float* from, int64_t token, int64_t panel) {
      for (int64_t row = panel * PANEL, last = std::min(row + PANEL, rows); row < last; row++)
        outputs[token * rows + row] = rounded(*from++ + (bias == nullptr ? 0.0f : bias[row]), T());
    };
    int64_t panel = begin, apart = tokens <= 2 ? (end - begin) / STREAMS : 0;
    for (; panel < begin + apart; panel++) {
      const W* first = weights + panel * size;
      if (tokens == 1)
        sums<1, STREAMS, LINES>(first, size, apart * size, ahead(first), states, stride, buffer);
      else
        sums<2, STREAMS, LINES>(first, size, apart * size, ahead(first), states, stride, buffer);
      for (int64_t stream = 0; stream < STREAMS; stream++)
        for (int64_t t = 0; t < tokens; t++) write(buffer + (stream * tokens + t) * PANEL, t, panel + stream * apart);
    }
    // Each group of tokens fetches its share of the set that comes next, so that memory is read all the time.
    for (panel = begin + STREAMS * apart; panel < end; panel += SET) {
      const int64_t last = std::min(panel + SET, end);
      const char* fetched = groups == 1 ? ahead(weights + panel * size) : bytes(weights + last * size);
      for (int64_t group = 0; group < groups; group++) {
        const int64_t token = tokens * group / groups, now = tokens * (group + 1) / groups - token;
        const int64_t lines = shared(group + 1, groups) - shared(group, groups);
        for (int64_t one = panel; one < last; one++, fetched += lines * size * sizeof(W) / LINES) {
          one_panel<TOKENS, LINES>(now, lines, weights + one * size, size, fetched, states + token * stride, stride,
                                   buffer);
          for (int64_t t = 0; t < now; t++) write(buffer + t * PANEL, token + t, one);
        }
      }
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
  TORCH_CHECK(states.dim() > 0 && states.size(-1) > 0, "product: states without columns");
  TORCH_CHECK(states.scalar_type() == panels.scalar_type(), "product: types differ");
  const int64_t columns = states.size(-1), tokens = states.numel() / columns;
  const int64_t block = LANES * sizeof(float) / panels.element_size();
  const int64_t stride = (columns + block - 1) / block * block, size = PANEL * stride;
  TORCH_CHECK(panels.is_contiguous() && panels.dim() == 2 && panels.size(0) == (rows + PANEL - 1) / PANEL &&
                  panels.size(1) == size,
              "product: panels of another matrix");
  TORCH_CHECK(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == rows), "product: bias of another matrix");
  auto shape = states.sizes().vec();
  shape.back() = rows;
  at::Tensor outputs = at::empty(shape, states.options());
  if (tokens == 0) return outputs;
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
