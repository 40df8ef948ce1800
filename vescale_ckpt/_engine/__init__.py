"""Borders on C++ and on torch: the engine `_C`, its tables and options, and the private names of torch."""

try:
    from . import _C as _C
except ImportError as error:
    if "_C" not in str(error) and "vescale_ckpt" not in str(error):
        raise  # the engine is there and lacks a library
    from pathlib import Path

    _place = Path(__file__).resolve().parents[2]
    _advice = (
        "run `pip install -e .` there, or work in another folder"
        if (_place / "setup.py").exists()
        else "install vescale_ckpt anew: its wheel is made for another Python, or it is not whole"
    )
    raise ImportError(f"vescale_ckpt in {_place} has no compiled engine: {_advice}") from error
