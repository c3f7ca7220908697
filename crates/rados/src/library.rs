//! librados' functions, found when first asked for. Declared as in librados.h of Ceph 16; the interface has been the same since 0.69 or,
//! where operations are concerned, 0.75.

use crate::{RadosError, Text};
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

/// The number that a call fails with when there is no such object.
pub const ENOENT: i32 = 2;
/// The name that the library has had since its interface became stable.
const NAME: &str = "librados.so.2";

type Any = *mut c_void;

macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions.
        pub struct Library {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            _library: libloading::Library,
        }

        impl Library {
            fn load() -> Result<Self, RadosError> {
                let failed = |e: libloading::Error| RadosError::Library(e.to_string());
                // SAFETY: loading it runs its initialisers, which are those of a library of the distribution.
                let library = unsafe { libloading::Library::new(NAME) }.map_err(failed)?;
                Ok(Self {
                    // SAFETY: each is declared as in librados.h.
                    $($name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.map_err(failed)?,)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    create2 = "rados_create2": fn(*mut Any, Text, Text, u64) -> c_int;
    conf_read_file = "rados_conf_read_file": fn(Any, Text) -> c_int;
    conf_set = "rados_conf_set": fn(Any, Text, Text) -> c_int;
    connect = "rados_connect": fn(Any) -> c_int;
    shutdown = "rados_shutdown": fn(Any);
    ioctx_create = "rados_ioctx_create": fn(Any, Text, *mut Any) -> c_int;
    ioctx_destroy = "rados_ioctx_destroy": fn(Any);
    ioctx_set_namespace = "rados_ioctx_set_namespace": fn(Any, Text);
    read = "rados_read": fn(Any, Text, *mut c_char, usize, u64) -> c_int;
    write = "rados_write": fn(Any, Text, *const c_char, usize, u64) -> c_int;
    remove = "rados_remove": fn(Any, Text) -> c_int;
    create_write_op = "rados_create_write_op": fn() -> Any;
    release_write_op = "rados_release_write_op": fn(Any);
    write_op_zero = "rados_write_op_zero": fn(Any, u64, u64);
    write_op_operate = "rados_write_op_operate": fn(Any, Any, Text, *mut c_void, c_int) -> c_int;
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(NAME)
    }
}

impl Library {
    /// Loads it, unless it is.
    pub fn get() -> Result<&'static Self, RadosError> {
        static LOADED: OnceLock<Result<Library, RadosError>> = OnceLock::new();
        LOADED.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }
}

/// Changes to an object that happen together.
pub struct WriteOp<'a> {
    library: &'a Library,
    handle: Any,
}

impl<'a> WriteOp<'a> {
    pub fn new(library: &'a Library) -> Self {
        // SAFETY: it needs nothing.
        Self { library, handle: unsafe { (library.create_write_op)() } }
    }

    pub const fn handle(&self) -> Any {
        self.handle
    }
}

impl Drop for WriteOp<'_> {
    fn drop(&mut self) {
        // SAFETY: it was made by `new`, and is released once.
        unsafe { (self.library.release_write_op)(self.handle) }
    }
}
