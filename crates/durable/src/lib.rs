//! Small files that a loss of power leaves as they were or as they were to be, never as a mixture.
//!
//! Two ways. [`replace`] writes another file and renames it: for what is written now and then, of any size. [`Slots`] write in place, into the
//! slot that does not hold the last contents: for what a guest waits for. A rename has the file system end its journal's transaction, and
//! with it write whatever others have written lately; an overwrite needs the file's own bytes on the medium and nothing else.

mod replaced;
mod slots;

pub use replaced::{remove, replace, replace_as};
pub use slots::{Layout, Slots};
