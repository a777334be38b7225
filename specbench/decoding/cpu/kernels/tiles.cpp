// See tiles.h. A tile of outputs is summed over the columns, 32 at a time, in one order, whatever is computed beside it:
// a token's bits depend neither on its row of the tile nor on how many rows there are.
#include "tiles.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

using specbench::TILE_COLUMNS;
using specbench::TILE_ROWS;

constexpr int64_t TILE = TILE_ROWS * TILE_COLUMNS;   // numbers
constexpr int64_t SUMS = TILE_ROWS * TILE_ROWS;      // of a tile of outputs
constexpr int64_t LINE = 64;                         // bytes of a tile's row
constexpr int64_t AHEAD = 8192;                      // bytes between what is read and what is fetched, as in product.cpp
constexpr int64_t THREAD = 1 << 16;                  // numbers of a matrix that are worth a thread
constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl

struct alignas(64) Configuration {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Of eight tiles the first ones have so many rows. To be called in each thread.
void configure(int first, int64_t rows) {
  Configuration configuration;
  for (int tile = 0; tile < 8; tile++) {
    configuration.bytes[tile] = LINE;
    configuration.rows[tile] = tile < first ? rows : TILE_ROWS;
  }
  // GCC 12's intrinsic tells the compiler of 8 of these bytes alone: the others must be written, too.
  asm volatile("" : : "r"(&configuration) : "memory");
  _tile_loadconfig(&configuration);
}

// The outputs of one group of tokens, or of two, and of two panels: a tile each, the panels of a group side by side.
// Meanwhile it fetches `lines` of each panel that comes next, for each tile that it reads. Tiles 0 to 3 are outputs, 4 and
// 5 states, 6 and 7 weights.
template <bool TWO>
[[gnu::noinline]] void sums(const uint16_t* left, const uint16_t* right, int64_t tiles, const uint16_t* states,
                            int64_t columns, int64_t group, const char* fetched, int64_t apart, int64_t lines,
                            float* outputs) {
  const int64_t stride = columns * sizeof(uint16_t);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (TWO) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t tile = 0; tile < tiles; tile++, left += TILE, right += TILE, states += TILE_COLUMNS) {
    for (int64_t line = 0; line < lines; line++, fetched += LINE) {
      __builtin_prefetch(fetched, 0, 2);
      __builtin_prefetch(fetched + apart, 0, 2);
    }
    _tile_loadd(4, states, stride);
    _tile_loadd(6, left, LINE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right, LINE);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (TWO) {
      _tile_loadd(5, states + group, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, outputs, LINE);
  _tile_stored(1, outputs + SUMS, LINE);
  if constexpr (TWO) {
    _tile_stored(2, outputs + 2 * SUMS, LINE);
    _tile_stored(3, outputs + 3 * SUMS, LINE);
  }
}

// Adds the bias to a tile of outputs, of tokens and of rows from `row` on, and rounds it.
void write(const float* from, int64_t tokens, const float* bias, int64_t row, int64_t rows, uint16_t* to) {
  const __mmask16 there = rows - row < TILE_ROWS ? (1u << (rows - row)) - 1 : 0xffffu;
  const __m512 summand = bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(there, bias + row);
  for (int64_t token = 0; token < tokens; token++, from += TILE_ROWS, to += rows)
    _mm256_mask_storeu_epi16(to + row, there, (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(from) + summand));
}

// Writes the columns of a tile, times `scale`, as rows that lie `stride` apart.
void write_columns(const float* tile, float scale, int64_t columns, float* to, int64_t stride) {
  __m512 rows[TILE_ROWS], pairs[TILE_ROWS], turned[TILE_ROWS];
  for (int i = 0; i < TILE_ROWS; i++) rows[i] = _mm512_load_ps(tile + i * TILE_ROWS) * scale;
  for (int i = 0; i < TILE_ROWS; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  // Four lanes, each with four numbers of a column: of those of its own number, and of every fourth one.
  for (int i = 0; i < TILE_ROWS; i += 4)
    for (int half = 0; half < 2; half++) {
      __m512d above = (__m512d)pairs[i + half], below = (__m512d)pairs[i + 2 + half];
      rows[i + 2 * half] = (__m512)_mm512_unpacklo_pd(above, below);
      rows[i + 2 * half + 1] = (__m512)_mm512_unpackhi_pd(above, below);
    }
  for (int i = 0; i < 4; i++) {
    const __m512 even[2] = {_mm512_shuffle_f32x4(rows[i], rows[i + 4], 0x88),
                            _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0x88)};
    const __m512 odd[2] = {_mm512_shuffle_f32x4(rows[i], rows[i + 4], 0xdd),
                           _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0xdd)};
    turned[i] = _mm512_shuffle_f32x4(even[0], even[1], 0x88);
    turned[i + 4] = _mm512_shuffle_f32x4(odd[0], odd[1], 0x88);
    turned[i + 8] = _mm512_shuffle_f32x4(even[0], even[1], 0xdd);
    turned[i + 12] = _mm512_shuffle_f32x4(odd[0], odd[1], 0xdd);
  }
  for (int64_t i = 0; i < columns; i++) _mm512_storeu_ps(to + i * stride, turned[i]);
}

}  // namespace

bool specbench::has_tiles() {
  static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return granted;
}

void specbench::tile_product(const uint16_t* panels, int64_t count, const uint16_t* states, int64_t tokens,
                             int64_t columns, const float* bias, int64_t rows, uint16_t* outputs) {
  const int64_t size = columns * TILE_ROWS, tiles = columns / TILE_COLUMNS;
  const int64_t groups = (tokens + TILE_ROWS - 1) / TILE_ROWS, each = (tokens + groups - 1) / groups;
  const int64_t pairs = (groups + 1) / 2;
  std::vector<uint16_t> filled;  // up to groups of one size
  if (groups * each > tokens) {
    filled.resize(groups * each * columns);
    std::copy_n(states, tokens * columns, filled.begin());
    states = filled.data();
  }
  use_threads_of_torch();
  at::parallel_for(0, count, std::max<int64_t>(1, THREAD / size), [&](int64_t begin, int64_t end) {
    // Two panels at a time, half of all apart; of an odd number the one in the middle is computed twice.
    const int64_t half = (end - begin + 1) / 2, apart = end - begin - half;
    alignas(64) float buffer[4 * SUMS];
    configure(6, each);
    for (int64_t panel = begin; panel < begin + half; panel++) {
      const uint16_t* left = panels + panel * size;
      const uint16_t* right = left + apart * size;
      const char* fetched = reinterpret_cast<const char*>(left) + (pairs == 1 ? AHEAD : size * sizeof(uint16_t));
      for (int64_t pair = 0; pair < pairs; pair++) {
        // Each pair of groups fetches its share of the next panels.
        const int64_t lines = TILE_ROWS * (pair + 1) / pairs - TILE_ROWS * pair / pairs;
        const int64_t group = 2 * pair, some = std::min<int64_t>(2, groups - group);
        const auto compute = some == 2 ? sums<true> : sums<false>;
        compute(left, right, tiles, states + group * each * columns, columns, each * columns, fetched,
                apart * size * sizeof(uint16_t), lines, buffer);
        fetched += lines * LINE * tiles;
        for (int64_t one = 0; one < some; one++) {
          const int64_t token = (group + one) * each, last = std::min(token + each, tokens);
          for (int64_t side = 0; side < 2; side++)
            write(buffer + (2 * one + side) * SUMS, last - token, bias, (panel + side * apart) * TILE_ROWS, rows,
                  outputs + token * rows);
        }
      }
    }
    _tile_release();
  });
}

// Tile 0 is scores, 1 entries, of which the last ones may be fewer, and 2 queries.
void specbench::tile_scores(const uint16_t* queries, int64_t count, const uint16_t* entries, int64_t visible,
                            int64_t stride, int64_t columns, float scale, float* scores, int64_t length) {
  const int64_t tiles = columns / TILE_COLUMNS, bytes = stride * sizeof(uint16_t);
  alignas(64) float buffer[SUMS];
  for (int64_t entry = 0; entry < visible; entry += TILE_ROWS, entries += TILE_ROWS * stride) {
    const int64_t rows = std::min(TILE_ROWS, visible - entry);
    if (entry == 0 || rows < TILE_ROWS) configure(2, rows);
    const uint16_t* tile = queries;
    for (int64_t query = 0; query < count; query += TILE_ROWS) {
      _tile_zero(0);
      for (int64_t i = 0; i < tiles; i++, tile += TILE) {
        _tile_loadd(1, entries + i * TILE_COLUMNS, bytes);
        _tile_loadd(2, tile, LINE);
        _tile_dpbf16ps(0, 1, 2);
      }
      _tile_stored(0, buffer, LINE);
      write_columns(buffer, scale, std::min(TILE_ROWS, count - query), scores + query * length + entry, length);
    }
  }
  _tile_release();
}

#else

bool specbench::has_tiles() { return false; }

void specbench::tile_scores(const uint16_t*, int64_t, const uint16_t*, int64_t, int64_t, int64_t, float, float*,
                            int64_t) {}

void specbench::tile_product(const uint16_t*, int64_t, const uint16_t*, int64_t, int64_t, const float*, int64_t,
                             uint16_t*) {}

#endif
