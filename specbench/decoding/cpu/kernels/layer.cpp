// What a compiled layer calls: products by their number, and attention over the layer's part of a cache.
//
// All layers of a kind share one compiled function. So what it works on is set before it is called.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <vector>

#include "kernels.h"

namespace {

using Optional = std::optional<at::Tensor>;

struct Layer {
  std::vector<at::Tensor> panels;      // of each product; undefined where it has none
  std::vector<at::Tensor> entries;     // keys and values of the cache, and where the new ones go; none: Python attends
  Optional index;                      // of the new entries, where they do not follow one another
  Optional mask;
  double scale;
};

thread_local Layer layer;

void set_layer(const c10::List<Optional>& panels, at::TensorList entries, const Optional& index, const Optional& mask,
               double scale) {
  layer.panels.clear();
  for (const Optional& one : panels) layer.panels.push_back(one.value_or(at::Tensor()));
  layer.entries = entries.vec();
  layer.index = index, layer.mask = mask, layer.scale = scale;
}

at::Tensor layer_product(const at::Tensor& states, const Optional& bias, int64_t number, int64_t rows) {
  const at::Tensor& panels = layer.panels.at(number);
  if (panels.defined()) return specbench::product(states, panels, bias, rows);
  static const auto python = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("specbench_layer::product", "")
                                 .typed<at::Tensor(const at::Tensor&, const Optional&, int64_t, int64_t)>();
  return python.call(states, bias, number, rows);
}

void write(const at::Tensor& to, const at::Tensor& states) {
  if (layer.index.has_value())
    to.index_copy_(0, *layer.index, states.transpose(1, 2).flatten(0, 1));
  else
    to.copy_(states);
}

at::Tensor layer_attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  if (!layer.entries.empty()) {
    write(layer.entries[2], key);
    write(layer.entries[3], value);
    return specbench::attend(query, layer.entries[0], layer.entries[1], layer.mask, layer.scale);
  }
  static const auto python =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("specbench_layer::attend", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>();
  return python.call(query, key, value);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specbench, m) {
  m.def("set_layer(Tensor?[] panels, Tensor[] entries, Tensor? index, Tensor? mask, float scale) -> ()", set_layer);
  m.def("layer_product(Tensor states, Tensor? bias, int number, int rows) -> Tensor");
  m.def("layer_attend(Tensor query, Tensor key, Tensor value) -> Tensor");
}
TORCH_LIBRARY_IMPL(specbench, CPU, m) {
  m.impl("layer_product", layer_product);
  m.impl("layer_attend", layer_attend);
}
