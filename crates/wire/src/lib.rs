//! Endpoints, wires and components.
