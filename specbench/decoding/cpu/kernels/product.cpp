// Products of a few tokens with a large matrix, which take as long as the matrix takes to be read.
//
// The matrix lies in panels of PANEL rows. Within a panel a vector of each row follows that of the row before, so that
// memory is read from its first byte to its last. An output is one chain of sums over the columns, LANES of them side
// by side, whatever is computed beside it: other tokens, other rows, other threads. Of bfloat16 a sum takes two columns
// at once where the processor has instructions for that (AVX512_BF16).
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "kernels.h"
#include "simd.h"
#include "tiles.h"

namespace {

constexpr int64_t PANEL = REGISTERS == 32 ? 4 : 2;
// The sums of TOKENS tokens and ABREAST panels fill the registers, beside states and a weight; so do those of three tokens
// and two panels, and of two and three.
constexpr int64_t TOKENS = REGISTERS == 32 ? 6 : 3;   // of a group
constexpr int64_t ABREAST = REGISTERS == 32 ? 1 : 2;  // panels that a group reads side by side
constexpr int64_t STREAMS = 3;       // likewise one or two tokens: memory gives more than for one
constexpr int64_t SET = 4;           // panels that every group goes through before the next ones are read
constexpr int64_t LINE = 64;         // bytes
constexpr int64_t LINES = 4;         // of a panel that a step reads
constexpr int64_t BLOCKS = LINES * LINE / (PANEL * LANES * sizeof(float));  // of each row, likewise
constexpr int64_t AHEAD = 8192;      // bytes between what is read and what is fetched into the L2 cache, for one group
constexpr int64_t NEAR = 1024;       // the same of the L1 cache
constexpr int64_t THREAD = 1 << 16;  // numbers of a matrix that are worth a thread

// Whether the processor follows a few streams by itself: to fetch what they will read costs an EPYC of AVX-512 a fifth.
#if defined(__AVX512F__) && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
constexpr bool FOLLOWS = true;
#else
constexpr bool FOLLOWS = false;
#endif

// Whether a matrix of type W is multiplied in pairs of columns, as they lie in the words of a block.
template <class W>
constexpr bool PAIRS = HAS_DOTS && sizeof(W) == 2;

template <class W>
inline const char* bytes(const W* weights) { return reinterpret_cast<const char*>(weights); }

// The outputs [P, T, PANEL], filled up to a multiple of four, of T tokens, whose states (floats, or words of pairs) lie
// `stride` numbers apart, and of P panels of `size` numbers each, which lie `apart` numbers from one another. Meanwhile
// it fetches F lines in each step, from `fetched` on, and as many for each other panel. Not inlined: its registers would
// be spilled.
template <int T, int P, int F, class W>
[[gnu::noinline]] void sums(const W* weights, int64_t size, int64_t apart, const char* fetched, const float* states,
                            int64_t stride, float* outputs) {
  constexpr int V = PAIRS<W> ? 1 : VECTORS<W>, COUNT = P * T * PANEL;
  Floats total[(COUNT + 3) / 4 * 4] = {};
  for (const W* end = weights + size; weights < end; fetched += F * LINE) {
    UNROLLED for (int block = 0; block < BLOCKS; block++, weights += PANEL * BLOCK<W>, states += V * LANES) {
      UNROLLED for (int line = block; line < LINES; line += BLOCKS) {
        for (int p = 0; p < P && line < F; p++) __builtin_prefetch(fetched + p * apart * sizeof(W) + line * LINE, 0, 2);
        if (P == 1) __builtin_prefetch(bytes(weights) + NEAR + line / BLOCKS * LINE);
      }
      for (int v = 0; v < V; v++) {
        Floats state[T];
        for (int t = 0; t < T; t++) state[t] = in_register(load<Floats>(states + t * stride + v * LANES));
        for (int p = 0; p < P; p++)
          for (int r = 0; r < PANEL; r++) {
            const W* block = weights + p * apart + r * BLOCK<W>;
            Floats weight = in_register(PAIRS<W> ? load<Floats>(block) : load_vector(block, v));
            for (int t = 0; t < T; t++) {
              Floats& sum = total[(p * T + t) * PANEL + r];
              sum = PAIRS<W> ? dot(weight, state[t], sum) : fma(weight, state[t], sum);
            }
          }
      }
    }
  }
  UNROLLED for (int i = 0; i < COUNT; i += 4) {
    Quad four = lane_sums(total + i);
    std::memcpy(outputs + i, &four, sizeof four);
  }
}

// `sums` for as many tokens and lines as there are.
template <int T, int P, int F, class W>
void sums_of(int64_t tokens, int64_t lines, const W* weights, int64_t size, int64_t apart, const char* fetched,
             const float* states, int64_t stride, float* outputs) {
  if constexpr (T > 1)
    if (tokens < T)
      return sums_of<T - 1, P, F>(tokens, lines, weights, size, apart, fetched, states, stride, outputs);
  if constexpr (F > 0)
    if (lines < F) return sums_of<T, P, F / 2>(tokens, lines, weights, size, apart, fetched, states, stride, outputs);
  sums<T, P, F>(weights, size, apart, fetched, states, stride, outputs);
}

// How many of a step's lines the first groups have fetched.
inline int64_t shared(int64_t first, int64_t groups) { return (LINES * first + groups - 1) / groups; }

inline float rounded(float number, float) { return number; }
inline c10::BFloat16 rounded(float number, c10::BFloat16) { return c10::BFloat16(number); }

template <class W, class T>
void multiply(const W* weights, int64_t panels, int64_t size, const float* states, int64_t stride, int64_t tokens,
              const float* bias, int64_t rows, T* outputs) {
  const int64_t groups = (tokens + TOKENS - 1) / TOKENS;
  const int64_t streams = tokens <= 2 ? STREAMS : tokens == 3 ? 2 : ABREAST, set = groups == 1 ? 1 : SET;
  specbench::use_threads_of_torch();
  at::parallel_for(0, panels, std::max<int64_t>(1, THREAD / size), [&](int64_t begin, int64_t end) {
    float buffer[REGISTERS];
    // The outputs of panels from `first` to `last`, and of as many `apart` after them for each further stream.
    auto side_by_side = [&](int64_t first, int64_t last, int64_t count, int64_t apart, auto compute) {
      // Each group of tokens fetches its share of the set that comes next, so that memory is read all the time.
      for (int64_t next; first < last; first = next) {
        next = std::min(first + set, last);
        const char* fetched = groups == 1 ? bytes(weights + first * size) + AHEAD : bytes(weights + next * size);
        for (int64_t group = 0; group < groups; group++) {
          const int64_t token = tokens * group / groups, end = tokens * (group + 1) / groups;
          const int64_t lines = FOLLOWS && count > 1 ? 0 : shared(group + 1, groups) - shared(group, groups);
          for (int64_t panel = first; panel < next; panel++, fetched += lines * size * sizeof(W) / LINES) {
            compute(end - token, lines, weights + panel * size, size, apart * size, fetched, states + token * stride,
                    stride, buffer);
            const float* from = buffer;
            for (int64_t stream = 0; stream < count; stream++)
              for (int64_t t = token; t < end; t++)
                for (int64_t r = 0, row = (panel + stream * apart) * PANEL; r < PANEL; r++, row++, from++)
                  if (row < rows) outputs[t * rows + row] = rounded(*from + (bias == nullptr ? 0.0f : bias[row]), T());
          }
        }
      }
    };
    const int64_t apart = streams == 1 ? 0 : (end - begin) / streams;
    if (streams == STREAMS) side_by_side(begin, begin + apart, STREAMS, apart, sums_of<2, STREAMS, LINES, W>);
    if (streams == 2) side_by_side(begin, begin + apart, 2, apart, sums_of<3, 2, LINES, W>);
    side_by_side(begin + streams * apart, end, 1, 0, sums_of<TOKENS, 1, LINES, W>);
  });
}

// States [tokens, columns] as numbers of type T, filled up to `stride` columns with zeros.
template <class T>
at::Tensor filled_up(const at::Tensor& states, int64_t tokens, int64_t columns, int64_t stride) {
  constexpr auto type = c10::CppTypeToScalarType<T>::value;
  at::Tensor contiguous = states.contiguous();
  if (states.scalar_type() == type && stride == columns) return contiguous;
  at::Tensor filled = at::empty({tokens, stride}, states.options().dtype(type));
  T* to = filled.mutable_data_ptr<T>();
  auto fill = [&](const auto* from) {
    for (int64_t t = 0; t < tokens; t++, from += columns, to += stride)
      std::fill(std::copy_n(from, columns, to), to + stride, T(0));
  };
  if (states.scalar_type() == at::kFloat)
    fill(contiguous.const_data_ptr<float>());
  else
    fill(contiguous.const_data_ptr<c10::BFloat16>());
  return filled;
}

const uint16_t* words(const at::Tensor& tensor) {
  return reinterpret_cast<const uint16_t*>(tensor.const_data_ptr<c10::BFloat16>());
}

// States [tokens, columns] in bfloat16 as words of two, in the order of a panel's blocks, `stride` words a token.
at::Tensor paired(const at::Tensor& states, int64_t tokens, int64_t columns, int64_t stride) {
  at::Tensor filled = filled_up<c10::BFloat16>(states, tokens, columns, 2 * stride);
  at::Tensor pairs = at::empty({tokens, stride}, states.options().dtype(at::kFloat));
  const uint16_t* from = words(filled);
  float* to = pairs.mutable_data_ptr<float>();
  for (const float* end = to + tokens * stride; to < end; from += 2 * LANES, to += LANES)
    store(to, (Floats)pairs_of(from, from + LANES));
  return pairs;
}

bool in_tiles(at::ScalarType type) { return type == at::kBFloat16 && specbench::has_tiles(); }

// Rows of a panel, and numbers of which a row has a multiple.
std::tuple<int64_t, int64_t> shape_of_panels(at::ScalarType type) {
  if (in_tiles(type)) return {specbench::TILE_ROWS, specbench::TILE_COLUMNS};
  return {PANEL, BLOCKS * (type == at::kFloat ? BLOCK<float> : BLOCK<uint16_t>)};
}

}  // namespace

at::Tensor specbench::product(const at::Tensor& states, const at::Tensor& panels,
                              const std::optional<at::Tensor>& bias, int64_t rows) {
  const at::ScalarType type = states.scalar_type();
  TORCH_CHECK(states.dim() > 0 && states.size(-1) > 0, "product: states without columns");
  TORCH_CHECK(type == panels.scalar_type(), "product: types differ");
  const auto [panel, block] = shape_of_panels(type);
  const int64_t columns = states.size(-1), tokens = states.numel() / columns;
  const int64_t stride = (columns + block - 1) / block * block, size = panel * stride;
  TORCH_CHECK(panels.is_contiguous() && panels.dim() == 2 && panels.size(0) == (rows + panel - 1) / panel &&
                  panels.size(1) == size,
              "product: panels of another matrix");
  TORCH_CHECK(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == rows), "product: bias of another matrix");
  auto shape = states.sizes().vec();
  shape.back() = rows;
  at::Tensor outputs = at::empty(shape, states.options());
  if (tokens == 0) return outputs;
  at::Tensor summand = bias.has_value() ? bias->to(at::kFloat).contiguous() : at::Tensor();
  const float* added = bias.has_value() ? summand.const_data_ptr<float>() : nullptr;
  if (in_tiles(type)) {
    at::Tensor filled = filled_up<c10::BFloat16>(states, tokens, columns, stride);
    tile_product(words(panels), panels.size(0), words(filled), tokens, stride, added, rows,
                 reinterpret_cast<uint16_t*>(outputs.mutable_data_ptr<c10::BFloat16>()));
    return outputs;
  }
  const bool pairs = PAIRS<uint16_t> && type == at::kBFloat16;
  const int64_t between = pairs ? stride / 2 : stride;
  at::Tensor numbers =
      pairs ? paired(states, tokens, columns, between) : filled_up<float>(states, tokens, columns, between);
  const float* from = numbers.const_data_ptr<float>();
  if (type == at::kFloat)
    multiply(panels.const_data_ptr<float>(), panels.size(0), size, from, between, tokens, added, rows,
             outputs.mutable_data_ptr<float>());
  else
    multiply(words(panels), panels.size(0), size, from, between, tokens, added, rows,
             outputs.mutable_data_ptr<c10::BFloat16>());
  return outputs;
}

TORCH_LIBRARY_FRAGMENT(specbench, library) {
  library.def("product(Tensor states, Tensor panels, Tensor? bias, int rows) -> Tensor");
  library.def("panel(ScalarType type) -> (int, int)", shape_of_panels);
  library.def("lanes() -> int", [] { return int64_t(LANES); });
  library.def("has_tiles() -> bool", specbench::has_tiles);
}
TORCH_LIBRARY_IMPL(specbench, CPU, library) { library.impl("product", specbench::product); }
