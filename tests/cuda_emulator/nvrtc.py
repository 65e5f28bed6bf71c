"""What is asked of NVRTC itself."""


def getVersion() -> tuple[int, int]:
    """12.8."""
    return 12, 8
