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

}  // namespace specbench
