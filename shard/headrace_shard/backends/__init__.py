"""Device backends: a handful of fused operations a layer, behind one interface (`base.Backend`)."""
