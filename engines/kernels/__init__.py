"""CPU kernels for ONNX Runtime: a shared library of custom operators, built by ``CMakeLists.txt`` at install time."""
