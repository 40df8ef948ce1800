"""Borders on C++ and on torch: the engine `_C`, its tables and options, and the private names of torch."""

from importlib.util import find_spec

if find_spec(f"{__name__}._C") is None:
    from pathlib import Path

    _place = Path(__file__).resolve().parents[2]
    _advice = (
        "run `pip install -e .` there, or work in another folder"
        if (_place / "setup.py").exists()
        else "install vescale_ckpt anew: its wheel is made for another Python, or it is not whole"
    )
    raise ImportError(f"vescale_ckpt in {_place} has no compiled engine: {_advice}")
