//! QEMU's migration stream: parsed, made small, rebuilt.
