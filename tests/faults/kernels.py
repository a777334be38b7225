"""The kernels of a CPU, and the layers that are compiled for it."""

from tests.faults.fault import D, Fault, M

FAULTS = (
    Fault(
        "trees on our own kernels are allowed to round",
        "kernels",
        f"{M}/numeric_noise.py",
        "may_be_missed = rows * widest > native.MOST_TOKENS if own_kernels else trees",
        "may_be_missed = trees",
        ("tests/methods/test_verify_width.py",),
    ),
    Fault(
        "attention sees what the mask hides",
        "kernels",
        f"{D}/cpu/kernels/attention.cpp",
        "inline bool hides(float bias) { return bias != 0; }",
        "inline bool hides(float) { return false; }",
        ("tests/decoding/test_attention_kernel.py",),
    ),
    Fault(
        "the last rows of a matrix are left out",
        "kernels",
        f"{D}/cpu/kernels/product.cpp",
        "side_by_side(begin + streams * apart, end, 1, 0,",
        "side_by_side(begin + streams * apart, end - 1, 1, 0,",
        ("tests/decoding/test_native.py",),
    ),
    Fault(
        "two tokens are summed in another order than one",
        "kernels",
        f"{D}/cpu/kernels/product.cpp",
        ": fma(weight, state[t], sum);",
        ": (T == 2 ? weight * state[t] + sum : fma(weight, state[t], sum));",
        ("tests/decoding/test_native.py",),
    ),
    Fault(
        "a compiled layer reads the panels of a weight that was changed",
        "kernels",
        f"{D}/cpu/packed_linear.py",
        "if weight.data_ptr() != pointer or (version is not None and weight._version != version):",
        "if weight.data_ptr() != pointer:",
        ("tests/decoding/test_compiled_layers.py",),
    ),
    Fault(
        "a compiled layer writes the new keys of a batch over one another",
        "kernels",
        f"{D}/cpu/kernels/layer.cpp",
        "to.index_copy_(0, *layer.index,",
        "to.index_copy_(0, layer.index->fill_(0),",
        ("tests/decoding/test_compiled_layers.py",),
    ),
    Fault(
        "a compiled layer keeps the norm that it was compiled with",
        "kernels",
        f"{D}/cpu/compiled_layers.py",
        "tensors = {name: tensor for name, tensor in tensors.items()",
        "tensors = {name: tensor.clone() for name, tensor in tensors.items()",
        ("tests/decoding/test_compiled_layers.py",),
    ),
    Fault(
        "whether a compiled layer gives the layer's states is not looked at",
        "kernels",
        f"{D}/cpu/compiled_layers.py",
        "if not apart <= TOLERANCE[output.dtype]:",
        "if False:",
        ("tests/decoding/test_compiled_layers.py",),
    ),
    Fault(
        "generate is judged by the noise of our own passes",
        "kernels",
        f"{M}/certify.py",
        "bounds.append(self._noise_of_others)",
        "pass",
        ("tests/methods/test_verify_width.py",),
    ),
)
