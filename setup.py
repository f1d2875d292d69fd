"""The C kernels: an extension that an installation without a compiler goes without. All else is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("kernels/pdserve_kernels/cpu/csrc")

setup(
    ext_modules=[
        Extension(
            "pdserve_kernels.cpu._native",
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in [*SOURCES.glob("*.h"), *SOURCES.glob("*.inc")]),
            # Products and sums are fused where the kernels say so and nowhere else: bits are part of what they promise.
            extra_compile_args=[
                *("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
                *("-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"),
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
