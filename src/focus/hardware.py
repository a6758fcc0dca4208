"""How fast and how large the machine is that jobs without a record are predicted for; nothing here imports torch."""

from __future__ import annotations

from pydantic import Field

from focus.strict import Positive, Strict


class Hardware(Strict):
    """One GPU, or one core of a processor: what it could do at most, and the share of it that programs reach."""

    name: str = Field("NVIDIA H100 80 GB (SXM)", description="what the predictions are for")
    bfloat16_tflops: Positive = Field(989.0, description="peak of products in bfloat16, 10^12 operations a second")
    float32_tflops: Positive = Field(67.0, description="the same in float32, of which PyTorch rounds nothing to TF32")
    utilisation: float = Field(
        0.35, gt=0, le=1, description="share of the peak that products reach: eager PyTorch without fused layers"
    )
    bandwidth: Positive = Field(3350.0, description="10^9 bytes a second between memory and processor")
    bandwidth_share: float = Field(0.6, gt=0, le=1, description="share of the bandwidth that eager PyTorch reaches")
    launch: float = Field(
        1.0, ge=0, description="milliseconds a layer's forward pass takes at least, which small models wait for"
    )
    memory: Positive = Field(80.0, description="GiB of one device")
    usable: float = Field(0.9, gt=0, le=1, description="share of the memory that a job may fill")
    disk: Positive = Field(1.0, description="10^9 bytes a second at which weights are read")
    start: float = Field(20.0, ge=0, description="seconds in which a process imports, finds its device and stops")

    def rate(self, dtype: str) -> float:
        """Operations a second of products in a dtype, float32 or bfloat16."""
        peak = self.bfloat16_tflops if dtype == "bfloat16" else self.float32_tflops
        return peak * 1e12 * self.utilisation

    @property
    def bytes_a_second(self) -> float:
        """Bytes a second between memory and processor."""
        return self.bandwidth * 1e9 * self.bandwidth_share


GPU = Hardware()
"""An H100: the data sheet's peaks, of which training of large models is commonly reported to reach 35 to 40 %."""
CORE = Hardware(
    name="one core of an AMD EPYC",
    bfloat16_tflops=0.14,
    float32_tflops=0.06,
    utilisation=1.0,
    bandwidth=12.0,
    bandwidth_share=1.0,
    launch=0.5,
    start=1.0,
)
"""What the committed runs reach, two jobs side by side on two cores, imports left out: a test fits the rates again."""
