//! The Network Block Device protocol, server and client side, without a runtime.
