// The kernels, as other sources call them.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <omp.h>

#include <optional>

namespace specbench {

// To be called before a parallel loop: Clang brings an OpenMP of its own, which nobody has told how many threads torch
// computes with.
inline void use_threads_of_torch() { omp_set_num_threads(at::get_num_threads()); }

// States [..., in] times panels [count, PANEL * in'], in which in' is `in` filled up -> [..., rows].
at::Tensor product(const at::Tensor& states, const at::Tensor& panels, const std::optional<at::Tensor>& bias,
                   int64_t rows);

// Queries [b, heads, n, d], keys and values [b, kv_heads, kv_len, d], a mask [b or 1, 1, at least n, kv_len] or none
// -> [b, n, heads, d].
at::Tensor attend(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                  const std::optional<at::Tensor>& mask, double scale);

}  // namespace specbench
