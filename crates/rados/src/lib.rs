//! Objects in a pool of a Ceph cluster, by librados.
//!
//! The library is looked for when it is first needed, not when Godwit is built or started: who has no Ceph needs none of its packages.
//! What it needs to know of the cluster it takes from where every Ceph client does: `$CEPH_CONF`, `/etc/ceph/ceph.conf`, and the
//! keyring that is named there.
//!
//! # What can go wrong
//!
//! *The library or the cluster is not there*: connecting fails, after [`PATIENCE`] at most. *The cluster goes away later*: an operation
//! waits until it is back, as every client of Ceph does; nothing is lost, and who waits can be told so. *The pool is full*, or the user's
//! key does not allow it: the operation fails with the cluster's answer.
//!
//! An operation that has returned is durable on all the replicas that the pool demands: there is nothing to flush.

mod library;

use godwit_units::RadosPool;
use library::{Library, WriteOp};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::io;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// How long connecting may take, in seconds: a node that starts does not wait for ever.
pub const PATIENCE: u32 = 15;

/// Why there is no pool.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RadosError {
    /// The library cannot be loaded.
    #[error("cannot load librados ({0}); it comes with Debian's package librados2")]
    Library(String),
    /// The cluster's answer.
    #[error("cannot {what}: {why}")]
    Cluster {
        /// What was tried, on what.
        what: String,
        /// What it said.
        why: String,
    },
}

/// A connection to a cluster. One serves all pools: each has threads of its own.
#[derive(Debug)]
struct Cluster {
    library: &'static Library,
    handle: Handle,
}

/// A pointer of the library's; it may be used by several threads at once.
#[derive(Clone, Copy, Debug)]
struct Handle(*mut c_void);

// SAFETY: librados' handles of clusters and of I/O contexts may be used by any thread, and by several at once ("librados.h":
// all calls but those that create or destroy a handle are thread-safe). They are destroyed once, by the owner's `Drop`.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: the handle is of a connected cluster, all of whose contexts hold an `Arc` of this and are gone.
        unsafe { (self.library.shutdown)(self.handle.0) }
    }
}

/// A pool.
#[derive(Debug)]
pub struct Pool {
    cluster: Arc<Cluster>,
    context: Handle,
    name: String,
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the context was made by `open`, and is used by nobody else any more.
        unsafe { (self.cluster.library.ioctx_destroy)(self.context.0) }
    }
}

fn c_string(text: &str) -> Result<CString, RadosError> {
    let why = |e: std::ffi::NulError| RadosError::Cluster {
        what: format!("say {text:?} to the cluster"),
        why: e.to_string(),
    };
    CString::new(text).map_err(why)
}

fn answer(what: impl Into<String>, code: i32) -> Result<(), RadosError> {
    let why = || io::Error::from_raw_os_error(code.wrapping_neg()).to_string();
    if code < 0 { Err(RadosError::Cluster { what: what.into(), why: why() }) } else { Ok(()) }
}

impl Cluster {
    fn connect(user: &str) -> Result<Self, RadosError> {
        let library = Library::get()?;
        let name = c_string(&format!("client.{user}"))?;
        let mut handle = ptr::null_mut();
        // SAFETY: both names are strings that end with a zero, and live through the call; the handle is written to.
        let code = unsafe { (library.create2)(&raw mut handle, c"ceph".as_ptr(), name.as_ptr(), 0) };
        answer("prepare a connection to the cluster", code)?;
        let it = Self { library, handle: Handle(handle) };
        // SAFETY: the handle was made above; no path means where clients look by default.
        let code = unsafe { (library.conf_read_file)(handle, ptr::null()) };
        answer("read the cluster's configuration ($CEPH_CONF or /etc/ceph/ceph.conf)", code)?;
        let patience = c_string(&PATIENCE.to_string())?;
        for option in [c"client_mount_timeout", c"rados_mon_op_timeout"] {
            // SAFETY: as above; both are strings that end with a zero.
            let code = unsafe { (library.conf_set)(handle, option.as_ptr(), patience.as_ptr()) };
            answer(format!("set {}", option.to_string_lossy()), code)?;
        }
        // SAFETY: a handle that was made and configured, and not yet connected.
        let code = unsafe { (library.connect)(handle) };
        answer(format!("connect to the cluster as client.{user}"), code)?;
        Ok(it)
    }

    /// The connection that there is, or a new one.
    fn of(user: &str) -> Result<Arc<Self>, RadosError> {
        static KNOWN: OnceLock<Mutex<HashMap<String, Weak<Cluster>>>> = OnceLock::new();
        let mut known = KNOWN.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cluster) = known.get(user).and_then(Weak::upgrade) {
            return Ok(cluster);
        }
        let cluster = Arc::new(Self::connect(user)?);
        known.retain(|_, cluster| cluster.strong_count() > 0);
        known.insert(user.to_owned(), Arc::downgrade(&cluster));
        Ok(cluster)
    }
}

impl Pool {
    /// Connects to the cluster, unless this process has, and finds the pool.
    ///
    /// # Errors
    /// [`RadosError`]: without library or cluster, or when there is no such pool.
    pub fn open(place: &RadosPool) -> Result<Self, RadosError> {
        let cluster = Cluster::of(place.user())?;
        let (library, pool, namespace) = (cluster.library, c_string(place.pool())?, c_string(place.namespace())?);
        let mut context = ptr::null_mut();
        // SAFETY: a connected cluster, a string that ends with a zero, and a place for the context.
        let code = unsafe { (library.ioctx_create)(cluster.handle.0, pool.as_ptr(), &raw mut context) };
        answer(format!("open the pool `{}`", place.pool()), code)?;
        // SAFETY: the context was made above, and nobody else uses it yet.
        unsafe { (library.ioctx_set_namespace)(context, namespace.as_ptr()) };
        Ok(Self { cluster, context: Handle(context), name: place.pool().to_owned() })
    }

    fn object(&self, name: &str) -> io::Result<CString> {
        CString::new(name).map_err(|_| io::Error::other(format!("an object's name in `{}` with a zero", self.name)))
    }

    /// Reads an object from `at` on; how much there was. What does not exist is empty.
    ///
    /// # Errors
    /// The cluster's.
    pub fn read(&self, object: &str, at: u64, into: &mut [u8]) -> io::Result<usize> {
        let name = self.object(object)?;
        let library = self.cluster.library;
        // SAFETY: a context that lives; the name ends with a zero; the library writes at most so many bytes into the buffer.
        let code = unsafe { (library.read)(self.context.0, name.as_ptr(), into.as_mut_ptr().cast(), into.len(), at) };
        match code {
            code if code == -library::ENOENT => Ok(0),
            code => usize::try_from(code).map_err(|_| self.failed("read", code)),
        }
    }

    /// Writes; makes the object if need be. Durable when it returns.
    ///
    /// # Errors
    /// The cluster's.
    pub fn write(&self, object: &str, at: u64, from: &[u8]) -> io::Result<()> {
        let name = self.object(object)?;
        let library = self.cluster.library;
        // SAFETY: as for reading; the library reads so many bytes.
        let code = unsafe { (library.write)(self.context.0, name.as_ptr(), from.as_ptr().cast(), from.len(), at) };
        if code < 0 { Err(self.failed("write", code)) } else { Ok(()) }
    }

    /// Makes a part read as zeroes. Durable when it returns.
    ///
    /// # Errors
    /// The cluster's.
    pub fn zero(&self, object: &str, at: u64, length: u64) -> io::Result<()> {
        let name = self.object(object)?;
        let library = self.cluster.library;
        let op = WriteOp::new(library);
        // SAFETY: the operation was made above, and the context lives; no time is given, and no flags.
        let code = unsafe {
            (library.write_op_zero)(op.handle(), at, length);
            (library.write_op_operate)(op.handle(), self.context.0, name.as_ptr(), ptr::null_mut(), 0)
        };
        if code < 0 && code != -library::ENOENT { Err(self.failed("zero a part of", code)) } else { Ok(()) }
    }

    /// Removes an object, if there is one.
    ///
    /// # Errors
    /// The cluster's.
    pub fn remove(&self, object: &str) -> io::Result<()> {
        let name = self.object(object)?;
        // SAFETY: a context that lives, and a string that ends with a zero.
        let code = unsafe { (self.cluster.library.remove)(self.context.0, name.as_ptr()) };
        if code < 0 && code != -library::ENOENT { Err(self.failed("remove", code)) } else { Ok(()) }
    }

    fn failed(&self, what: &str, code: i32) -> io::Error {
        let why = io::Error::from_raw_os_error(code.wrapping_neg());
        io::Error::new(why.kind(), format!("cannot {what} an object of the pool `{}`: {why}", self.name))
    }
}

/// For the library's declarations.
type Text = *const std::ffi::c_char;
