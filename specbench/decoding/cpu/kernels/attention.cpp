// Attention of the few tokens of a short pass.
//
// The output of a token depends on its query and on the sequence of entries that are visible to it, and on nothing
// else: a path of a tree that is verified among its siblings gives the bits of the same path as a chain. The scores and
// the weights of different entries do not depend on each other. The greatest score and the sum of the weights, which
// are integers there, are the same in every order. The weighted values are summed one entry after the other, and an
// invisible entry adds zero times its values, which changes nothing as long as these are finite.
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels.h"
#include "simd.h"
#include "tiles.h"

namespace {

constexpr int QUERIES = REGISTERS == 32 ? 6 : 3;  // that are computed together, with the sums in registers
constexpr int ROWS = 4;                           // whose scores are computed together
constexpr int64_t SECTION = 64;                   // entries that all queries go through while they lie in the L1 cache
constexpr int64_t AHEAD = 24;                     // entries between the one that is read and the one that is fetched
constexpr int64_t CHUNK = 24;                     // queries: their scores have to stay in the L2 cache
constexpr int64_t GRAIN = 1 << 18;                // products that are worth a thread
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// Of functions with such loops: the registers are not shared with what calls them.
#define ALONE __attribute__((noinline))

// Keeps a vector in a register: GCC would load it anew for each of its products.
inline void hold(Floats& vector) {
#if defined(__AVX512F__)
  asm("" : "+v"(vector));
#elif defined(__AVX2__)
  asm("" : "+x"(vector));
#endif
}

inline void store_block(float* to, const Floats* from) { store(to, from[0]); }

// To the nearest bfloat16, in the upper half of each word.
inline Words rounded(Floats vector) {
  Words bits = (Words)vector;
  return vector == vector ? bits + 0x7fffu + (bits >> 16 & 1u) : bits | 0x400000u;
}

inline void store_block(uint16_t* to, const Floats* from) {
  Words pairs = (rounded(from[0]) >> 16) | (rounded(from[1]) & 0xffff0000u);
  std::memcpy(to, &pairs, sizeof pairs);
}

// exp of numbers that are not above zero, as in the Cephes library. Below -87 it is exactly zero. A NaN stays one: its
// bits are no exponent.
inline Floats exponential(Floats x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  Floats shifted = fma(x, broadcast(1.44269504088896341f), broadcast(magic));
  Floats exponent = shifted - magic;
  Floats rest = fma(exponent, broadcast(-0.693359375f), x);
  rest = fma(exponent, broadcast(2.12194440e-4f), rest);
  Floats series = broadcast(1.9875691500e-4f);
  series = fma(series, rest, broadcast(1.3981999507e-3f));
  series = fma(series, rest, broadcast(8.3334519073e-3f));
  series = fma(series, rest, broadcast(4.1665795894e-2f));
  series = fma(series, rest, broadcast(1.6666665459e-1f));
  series = fma(series, rest, broadcast(5.0000001201e-1f));
  series = fma(series, rest * rest, rest) + 1.0f;
  Floats power = (Floats)((Words)series + ((Words)shifted << 23));
  return x < -87.0f ? Floats{} : x == x ? power : x;
}

// Rows of one head in the cache.
template <class T>
struct Rows {
  const T* first;
  int64_t stride, width;

  const T* operator[](int64_t entry) const { return first + entry * stride; }

  // Rows of a head lie apart in the cache, so that the processor does not foresee which comes next.
  void prefetch(int64_t entry) const {
    for (int64_t at = 0; at < width; at += 64 / sizeof(T)) __builtin_prefetch(first + entry * stride + at);
  }
};

// A matrix of scratch memory.
struct Scratch {
  float* first;
  int64_t stride;

  float* operator[](int64_t row) const { return first + row * stride; }
};

// The products of Q queries with the keys [begin, end), which are written as multiples of ROWS. Where the width is no
// multiple of blocks, the last block repeats a part of the one before, and the query is zero there.
template <int Q, class T>
ALONE void score(Scratch queries, Rows<T> keys, int64_t begin, int64_t end, Scratch scores, bool fetch) {
  constexpr int V = VECTORS<T>;
  const int64_t last = keys.width - BLOCK<T>;
  for (int64_t entry = begin; entry < end; entry += ROWS) {
    const T* rows[ROWS];
    for (int r = 0; r < ROWS; r++) rows[r] = keys[std::min(entry + r, end - 1)];
    for (int r = 0; fetch && r < ROWS; r++) keys.prefetch(entry + AHEAD + r);
    Floats totals[Q][ROWS];
    UNROLLED for (int q = 0; q < Q; q++) UNROLLED for (int r = 0; r < ROWS; r++) totals[q][r] = Floats{};
    const float* query = queries.first;
    for (int64_t at = 0; at < keys.width; at += BLOCK<T>, query += BLOCK<T>) {
      const int64_t offset = std::min(at, last);
      Floats states[Q][V];
      UNROLLED for (int q = 0; q < Q; q++)
        UNROLLED for (int v = 0; v < V; v++) states[q][v] = load<Floats>(query + q * queries.stride + v * LANES);
      UNROLLED for (int r = 0; r < ROWS; r++) {
        Floats key[V];
        load_block(rows[r] + offset, key);
        UNROLLED for (int v = 0; v < V; v++)
          UNROLLED for (int q = 0; q < Q; q++) totals[q][r] = fma(states[q][v], key[v], totals[q][r]);
      }
    }
    UNROLLED for (int q = 0; q < Q; q++) {
      Quad four = lane_sums(totals[q]);
      std::memcpy(scores[q] + entry, &four, sizeof four);
    }
  }
}

inline bool hides(float bias) { return bias != 0; }
inline bool hides(uint16_t bias) { return bias & 0x7fff; }

// Turns the scores of a query into weights, zero where `bias` is not, and returns what makes their sum one.
float weigh(float* scores, const float* bias, int64_t length) {
  Floats highest = broadcast(HIDDEN);
  for (int64_t i = 0; i < length; i += LANES) {
    Floats some = load<Floats>(scores + i);
    some = load<Floats>(bias + i) == 0.0f ? some : broadcast(HIDDEN);
    highest = some > highest ? some : highest;
    store(scores + i, some);
  }
  float top = highest[0];
  for (int lane = 1; lane < LANES; lane++) top = std::max(top, highest[lane]);
  if (top == HIDDEN) {
    std::fill(scores, scores + length, 0.0f);
    const bool blind = std::none_of(bias, bias + length, [](float number) { return number == 0.0f; });
    return blind ? 0.0f : std::numeric_limits<float>::quiet_NaN();  // as in torch
  }
  const float unit = 1 << 24;  // of the integers: a lane's sum of 64 fits
  int64_t total = 0;
  for (int64_t i = 0; i < length;) {
    Integers part = {};
    for (int64_t end = std::min<int64_t>(length, i + 64 * LANES); i < end; i += LANES) {
      Floats weights = exponential(load<Floats>(scores + i) - top);
      store(scores + i, weights);
      part += __builtin_convertvector(fma(weights, broadcast(unit), broadcast(0.5f)), Integers);
    }
    for (int lane = 0; lane < LANES; lane++) total += part[lane];
  }
  return float(unit / double(total));
}

inline Rows<float> widen(Rows<float> rows, int64_t, float*, int64_t) { return rows; }

// Widens rows, in blocks that follow one another: once for all tiles of queries.
inline Rows<float> widen(Rows<uint16_t> rows, int64_t count, float* to, int64_t padded) {
  const auto widen_block = [](const uint16_t* from, float* to) {
    Floats block[2];
    load_block(from, block);
    store(to, block[0]);
    store(to + LANES, block[1]);
  };
  const int64_t last = rows.width - BLOCK<uint16_t>;
  for (int64_t row = 0; row < count; row++) {
    rows.prefetch(row + AHEAD);
    const uint16_t* from = rows[row];
    float* into = to + row * padded;
    int64_t at = 0;
    for (; at <= last; at += BLOCK<uint16_t>) widen_block(from + at, into + at);
    if (at < padded) widen_block(from + last, into + at);
  }
  return {to, padded, padded};
}

// Adds `count` values with the weights of Q queries, V vectors of each.
template <int Q, int V>
ALONE void add_vectors(Scratch weights, Rows<float> values, int64_t count, Scratch sums, bool fetch) {
  Floats totals[Q][V];
  UNROLLED for (int q = 0; q < Q; q++)
    UNROLLED for (int v = 0; v < V; v++) totals[q][v] = load<Floats>(sums[q] + v * LANES);
  for (int64_t entry = 0; entry < count; entry++) {
    if (fetch) values.prefetch(entry + AHEAD);
    Floats weight[Q];
    UNROLLED for (int q = 0; q < Q; q++) weight[q] = broadcast(weights[q][entry]);
    UNROLLED for (int v = 0; v < V; v++) {
      Floats value = load<Floats>(values[entry] + v * LANES);
      hold(value);
      UNROLLED for (int q = 0; q < Q; q++) totals[q][v] = fma(weight[q], value, totals[q][v]);
    }
  }
  UNROLLED for (int q = 0; q < Q; q++)
    UNROLLED for (int v = 0; v < V; v++) store(sums[q] + v * LANES, totals[q][v]);
}

template <int Q, int V>
void add_values(Scratch weights, Rows<float> values, int64_t count, Scratch sums, bool fetch, int64_t offset = 0) {
  const auto from = [&](int64_t column) { return Rows<float>{values.first + column, values.stride, values.width}; };
  for (; offset + V * LANES <= values.width; offset += V * LANES, sums.first += V * LANES)
    add_vectors<Q, V>(weights, from(offset), count, sums, fetch && offset == 0);
  if constexpr (V > 1)
    add_values<Q, V / 2>(weights, values, count, sums, fetch, offset);
  else if (offset < values.width)
    add_vectors<Q, 1>(weights, from(values.width - LANES), count, sums, false);
}

// Calls a function with each tile of at most QUERIES queries: with their number, as a constant, and the first of them.
template <int Q = QUERIES, class F>
inline void tiles(int64_t count, F function, int64_t first = 0) {
  for (; first + Q <= count; first += Q) function(std::integral_constant<int, Q>(), first);
  if constexpr (Q > 1) tiles<Q - 1>(count, function, first);
}

template <class T>
struct Attention {
  const T *query, *keys, *values, *mask;
  T* result;
  int64_t heads, kv_heads, n, kv_len, width;
  at::IntArrayRef query_strides, key_strides, value_strides;
  int64_t mask_stride, mask_row_stride;
  float scale;
  bool on_tiles;  // whether the scores are computed there

  // The entries from the first to the last one that is visible to one of the tokens [low, high).
  std::pair<int64_t, int64_t> range(const T* masks, int64_t low, int64_t high) const {
    if (!masks) return {0, kv_len};
    int64_t begin = kv_len, end = 0;
    for (int64_t i = low; i < high; i++) {
      const T* row = masks + i * mask_row_stride;
      int64_t first = 0, last = kv_len;
      while (first < begin && hides(row[first])) first++;
      while (last > end && hides(row[last - 1])) last--;
      begin = std::min(begin, first), end = std::max(end, last);
    }
    return {begin, std::max(begin, end)};
  }

  // A query, scaled, in blocks that follow one another. What the last block repeats of the one before is zero there.
  void read(const T* from, float* to) const {
    for (int64_t at = 0; at < width; at += BLOCK<T>, to += BLOCK<T>) {
      const int64_t start = std::min(at, width - BLOCK<T>);
      Floats block[VECTORS<T>];
      load_block(from + start, block);
      for (int v = 0; v < VECTORS<T>; v++) {
        for (int lane = 0; start + lane * VECTORS<T> + v < at; lane++) block[v][lane] = 0.0f;
        store(to + v * LANES, block[v] * scale);
      }
    }
  }

  // A query, as a row of the tiles that `tile_scores` reads: its pairs lie a tile's row apart.
  void lay_in_tiles(const T* from, int64_t number, float* to) const {
    const int64_t row = specbench::TILE_ROWS, tile = number / row;
    for (int64_t pair = 0; pair < width / 2; pair++)
      std::memcpy(to + (tile * width / 2 + pair) * row + number % row, from + 2 * pair, sizeof(float));
  }

  // Adding zero makes negative zeros positive: whether a sum is one could depend on invisible entries.
  void write(const float* from, float factor, T* to) const {
    for (int64_t at = 0; at < width; at += BLOCK<T>, from += BLOCK<T>) {
      Floats block[VECTORS<T>];
      for (int v = 0; v < VECTORS<T>; v++) block[v] = load<Floats>(from + v * LANES) * factor + 0.0f;
      store_block(to + std::min(at, width - BLOCK<T>), block);
    }
  }

  // The queries [low, high) of one head of keys, token after token.
  void operator()(int64_t b, int64_t kv_head, int64_t low, int64_t high) const {
    const int64_t group = heads / kv_heads, count = high - low;
    const int64_t first = low / group, tokens = mask ? (high - 1) / group - first + 1 : 1;
    const T* masks = mask ? mask + b * mask_stride : nullptr;
    const auto [begin, end] = range(masks, first, first + tokens);
    const int64_t visible = end - begin;
    const int64_t length = (visible + LANES - 1) / LANES * LANES;
    const int64_t padded = (width + BLOCK<T> - 1) / BLOCK<T> * BLOCK<T>;

    thread_local std::vector<float> memory;
    // Queries in tiles have two numbers in a float, and are filled up.
    const int64_t in_tiles = (count + specbench::TILE_ROWS - 1) / specbench::TILE_ROWS * specbench::TILE_ROWS * width / 2;
    const int64_t query_size = on_tiles ? in_tiles : count * padded;
    const int64_t size = tokens * length + count * (length + padded) + query_size + SECTION * padded + LANES;
    if (int64_t(memory.size()) < size) memory.resize(size);
    float* start = memory.data();
    start += (-(reinterpret_cast<uintptr_t>(start) / sizeof(float))) % LANES;
    const Scratch biases{start, length}, scores{biases[tokens], length};
    const Scratch queries{scores[count], padded}, sums{queries.first + query_size, padded};

    for (int64_t i = 0; i < tokens; i++) {
      const T* row = masks ? masks + (first + i) * mask_row_stride + begin : nullptr;
      for (int64_t entry = 0; entry < visible; entry++) biases[i][entry] = row && hides(row[entry]) ? HIDDEN : 0.0f;
      std::fill(biases[i] + visible, biases[i] + length, HIDDEN);
    }
    if (on_tiles) std::fill(queries.first, queries.first + query_size, 0.0f);
    for (int64_t i = 0; i < count; i++) {
      const int64_t token = (low + i) / group, head = kv_head * group + (low + i) % group;
      const T* from = query + b * query_strides[0] + head * query_strides[1] + token * query_strides[2];
      if (on_tiles)
        lay_in_tiles(from, i, queries.first);
      else
        read(from, queries[i]);
    }
    std::fill(sums[0], sums[count], 0.0f);

    const Rows<T> key_rows{keys + b * key_strides[0] + kv_head * key_strides[1] + begin * key_strides[2],
                           key_strides[2], width};
    const Rows<T> value_rows{values + b * value_strides[0] + kv_head * value_strides[1] + begin * value_strides[2],
                             value_strides[2], width};
    if constexpr (sizeof(T) == sizeof(uint16_t))
      if (on_tiles && visible > 0)
        specbench::tile_scores(reinterpret_cast<const T*>(queries.first), count, key_rows[0], visible, key_rows.stride,
                               width, scale, scores.first, length);
    for (int64_t at = 0; at < visible && !on_tiles; at += SECTION)
      tiles(count, [&](auto q, int64_t i) {
        score<q.value>({queries[i], padded}, key_rows, at, std::min(at + SECTION, visible), {scores[i], length},
                       i == 0);
      });
    float factors[CHUNK];
    for (int64_t i = 0; i < count; i++)
      factors[i] = weigh(scores[i], biases[mask ? (low + i) / group - first : 0], length);
    for (int64_t at = 0; at < visible; at += SECTION) {
      const int64_t some = std::min(SECTION, visible - at);
      const Rows<float> wide = widen({value_rows[at], value_rows.stride, width}, some, sums[count], padded);
      tiles(count, [&](auto q, int64_t i) {
        constexpr int most = q.value == 1 ? 8 : 4;
        add_values<q.value, most>({scores[i] + at, length}, wide, some, {sums[i], padded}, i == 0);
      });
    }

    for (int64_t i = 0; i < count; i++) {
      const int64_t token = (low + i) / group, head = kv_head * group + (low + i) % group;
      write(sums[i], factors[i], result + ((b * n + token) * heads + head) * width);
    }
  }
};

template <class T, class Stored>
at::Tensor attend_as(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, const at::Tensor* mask,
                     double scale) {
  const int64_t b = query.size(0), heads = query.size(1), n = query.size(2), width = query.size(3);
  if (width < BLOCK<T>) {
    auto pad = [&](const at::Tensor& states) { return at::constant_pad_nd(states, {0, BLOCK<T> - width}); };
    return attend_as<T, Stored>(pad(query), pad(keys), pad(values), mask, scale).narrow(3, 0, width).contiguous();
  }
  at::Tensor result = at::empty({b, n, heads, width}, query.options());
  auto data = [](const at::Tensor& tensor) { return reinterpret_cast<const T*>(tensor.const_data_ptr<Stored>()); };
  const int64_t kv_heads = keys.size(1), kv_len = keys.size(2), of_head = heads / kv_heads * n;
  const Attention<T> attention{
      data(query), data(keys), data(values), mask ? data(*mask) : nullptr,
      reinterpret_cast<T*>(result.mutable_data_ptr<Stored>()), heads, kv_heads, n, kv_len, width,
      query.strides(), keys.strides(), values.strides(),
      mask && mask->size(0) > 1 ? mask->stride(0) : 0, mask ? mask->stride(2) : 0, float(scale),
      sizeof(T) == sizeof(uint16_t) && width % specbench::TILE_COLUMNS == 0 && specbench::has_tiles()};
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, kv_len * width));
  specbench::use_threads_of_torch();
  at::parallel_for(0, b * kv_heads * of_head, grain, [&](int64_t low, int64_t high) {
    while (low < high) {
      const int64_t head = low / of_head, first = low % of_head;
      const int64_t count = std::min({high - low, of_head - first, CHUNK});
      attention(head / kv_heads, head % kv_heads, first, first + count);
      low += count;
    }
  });
  return result;
}

}  // namespace

at::Tensor specbench::attend(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                             const std::optional<at::Tensor>& mask, double scale) {
  TORCH_CHECK(query.dim() == 4 && keys.dim() == 4 && keys.sizes() == values.sizes(), "attend: shapes");
  TORCH_CHECK(keys.size(1) > 0 && query.size(1) % keys.size(1) == 0, "attend: query heads per head of keys");
  TORCH_CHECK(query.size(0) == keys.size(0) && query.size(3) == keys.size(3), "attend: query and keys differ");
  TORCH_CHECK(query.stride(3) == 1 && keys.stride(3) == 1 && values.stride(3) == 1, "attend: rows are not contiguous");
  TORCH_CHECK(keys.scalar_type() == query.scalar_type() && values.scalar_type() == query.scalar_type(),
              "attend: types differ");
  if (mask) {
    TORCH_CHECK(mask->dim() == 4 && mask->size(1) == 1 && mask->size(3) == keys.size(2), "attend: the mask's shape");
    TORCH_CHECK(mask->size(0) == query.size(0) || mask->size(0) == 1, "attend: the mask is of other sequences");
    TORCH_CHECK(mask->size(2) >= query.size(2), "attend: the mask is of fewer tokens");
    TORCH_CHECK(mask->scalar_type() == query.scalar_type(), "attend: the mask's type");
    TORCH_CHECK(mask->size(3) <= 1 || mask->stride(3) == 1, "attend: the mask's rows are not contiguous");
  }
  const at::Tensor* with = mask ? &*mask : nullptr;
  if (query.scalar_type() == at::kFloat) return attend_as<float, float>(query, keys, values, with, scale);
  TORCH_CHECK(query.scalar_type() == at::kBFloat16, "attend: float32 or bfloat16");
  return attend_as<uint16_t, at::BFloat16>(query, keys, values, with, scale);
}

TORCH_LIBRARY_FRAGMENT(specbench, m) {
  m.def("attend(Tensor query, Tensor keys, Tensor values, Tensor? mask, float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(specbench, CPU, m) { m.impl("attend", specbench::attend); }
