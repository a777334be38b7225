// Products of bfloat16 by the tiles of a processor with AMX, sixteen times as fast as by its vectors.
#pragma once

#include <cstdint>

namespace specbench {

constexpr int64_t TILE_ROWS = 16;     // of a tile; panels have as many
constexpr int64_t TILE_COLUMNS = 32;  // numbers of a row

// Whether the processor has tiles and the system lets this process use them.
bool has_tiles();

// States [tokens, columns] times panels [count, columns * TILE_ROWS] -> outputs [tokens, rows]. In a panel tiles follow one
// another; each row of a tile has two columns of all rows. `bias` is null or [rows].
void tile_product(const uint16_t* panels, int64_t count, const uint16_t* states, int64_t tokens, int64_t columns,
                  const float* bias, int64_t rows, uint16_t* outputs);

// Products of queries with entries, times `scale` -> scores [count, length], in which `length` is a multiple of TILE_ROWS.
// Queries lie in tiles, as the rows of a panel do, filled up with zeros; entries lie `stride` numbers apart, and `columns`
// is a multiple of TILE_COLUMNS.
void tile_scores(const uint16_t* queries, int64_t count, const uint16_t* entries, int64_t visible, int64_t stride,
                 int64_t columns, float scale, float* scores, int64_t length);

}  // namespace specbench
