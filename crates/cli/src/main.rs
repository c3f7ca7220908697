//! The one binary: `godwit controller`, `godwit node`, and the user's commands.

fn main() {}
