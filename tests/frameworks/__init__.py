"""Programs of frameworks, under torchrun over gloo and under gpusim torchrun: `make frameworks`."""
