//! Loads the libraries. Each function is looked up by name, because a missing one must not keep the process from starting.

use std::ffi::CString;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::warn;
use windows_sys::Win32::Foundation::HMODULE;
use windows_sys::Win32::System::Com::CoTaskMemFree;
use windows_sys::Win32::System::LibraryLoader::{
    GetProcAddress, LOAD_LIBRARY_SEARCH_SYSTEM32, LoadLibraryExW,
};

use super::calls::Calls;
use super::deadline::{NoResult, Workers};
use super::functions::{FreeFunction, Functions, ObjectFunctions};
use super::in_flight::InFlight;
use super::notifications::{self, Watchers};
use crate::{Call, Failure, HResult, Hcn};

/// Why HNS cannot be called.
#[derive(Debug, thiserror::Error)]
#[error("{library} cannot be loaded: {source}; install the Windows feature Containers, and restart the node")]
pub struct LibraryError {
    /// The library.
    pub library: &'static str,
    /// The error of the system.
    #[source]
    pub source: io::Error,
}

/// HNS of this machine.
///
/// A call without an answer within the deadline fails with `ERROR_TIMEOUT`, but **HNS may still complete it**. Its late
/// result is logged, and whoever watches is told to read the current state. Until then, further changes of the same object
/// fail with `ERROR_BUSY`.
pub struct NativeHcn {
    calls: Calls,
    register: Option<super::functions::RegisterFunction>,
    deadline: Duration,
    in_flight: InFlight,
    workers: Arc<Workers>,
    watchers: &'static Watchers,
}

impl NativeHcn {
    /// Loads the libraries. No call takes longer than `deadline`.
    ///
    /// # Errors
    /// `computenetwork.dll` is missing: Windows before 1809, or without containers.
    pub fn load(deadline: Duration) -> Result<NativeHcn, LibraryError> {
        let compute_network = load("computenetwork.dll")?;
        // It only tells the version.
        let vm_compute = load("vmcompute.dll").inspect_err(|error| warn!(%error)).ok();
        let functions = functions(compute_network, vm_compute);
        Ok(NativeHcn {
            calls: Calls::new(functions),
            register: functions.register,
            deadline,
            in_flight: InFlight::default(),
            workers: Arc::default(),
            watchers: Box::leak(Box::default()),
        })
    }
}

impl Hcn for NativeHcn {
    fn call(&self, call: &Call) -> Result<String, Failure> {
        let change = self.in_flight.begin(call, Instant::now(), self.deadline).map_err(|(kind, id)| {
            let record = format!("an earlier change of {kind} {id} has no answer yet; this one waits for it");
            // Only this object has to wait, so this must not look as if HNS were away.
            Failure::new(HResult::ERROR_BUSY, record)
        })?;
        let (calls, own, late, watchers) = (self.calls, call.clone(), call.clone(), self.watchers);
        let report = move |result: Result<String, Failure>| {
            let failure = result.err().map(|failure| failure.to_string());
            warn!(call = late.name(), failure, "HNS has answered a call after its deadline");
            if !late.is_read() {
                watchers.tell();
            }
        };
        let work = move || {
            let result = calls.make(&own);
            drop(change);
            result
        };
        match self.workers.run(self.deadline, work, report) {
            Ok(result) => result,
            Err(NoResult::Late) => Err(Failure::new(
                HResult::ERROR_TIMEOUT,
                format!("HNS has not answered for {} seconds", self.deadline.as_secs()),
            )),
            Err(NoResult::NoWorker) => {
                Err(Failure::new(HResult::ERROR_TIMEOUT, "too many calls of HNS have no answer; it hangs"))
            }
        }
    }

    fn watch(&self, notify: Box<dyn Fn() + Send>) {
        if !self.watchers.add(notify) {
            return;
        }
        match self.register {
            Some(register) => {
                if let Err(error) = notifications::start(register, self.watchers) {
                    warn!(%error, "no notifications of HNS; its objects are checked at intervals only");
                }
            }
            None => {
                warn!("this Windows has no notifications of HNS; its objects are checked at intervals only")
            }
        }
    }
}

/// Loads a library of the system, and only from there. It stays loaded.
pub(super) fn load(library: &'static str) -> Result<HMODULE, LibraryError> {
    let name: Vec<u16> = library.encode_utf16().chain([0]).collect();
    // SAFETY: the name ends with NUL; the reserved parameter is null.
    let module = unsafe { LoadLibraryExW(name.as_ptr(), std::ptr::null_mut(), LOAD_LIBRARY_SEARCH_SYSTEM32) };
    if module.is_null() {
        return Err(LibraryError { library, source: io::Error::last_os_error() });
    }
    Ok(module)
}

/// Looks up a function.
///
/// # Safety
/// `F` must be a function pointer with the signature of the function of that name.
pub(super) unsafe fn find<F: Copy>(library: HMODULE, name: &str) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<usize>()) };
    let name = CString::new(name).ok()?;
    // SAFETY: the library is loaded and stays so; the name ends with NUL.
    let address = unsafe { GetProcAddress(library, name.as_ptr().cast()) }?;
    // SAFETY: by this function's contract, the function has this signature; both are function pointers.
    Some(unsafe { std::mem::transmute_copy(&address) })
}

/// The functions for the objects of that name, and of that name in the plural.
fn object(library: HMODULE, one: &str, many: &str) -> ObjectFunctions {
    // SAFETY: the signatures are those of the documentation (`functions`). That of HcnCreateEndpoint differs, and is looked
    // up elsewhere.
    unsafe {
        ObjectFunctions {
            enumerate: find(library, &format!("HcnEnumerate{many}")),
            create: if one == "Endpoint" { None } else { find(library, &format!("HcnCreate{one}")) },
            open: find(library, &format!("HcnOpen{one}")),
            modify: find(library, &format!("HcnModify{one}")),
            query: find(library, &format!("HcnQuery{one}Properties")),
            delete: find(library, &format!("HcnDelete{one}")),
            close: find(library, &format!("HcnClose{one}")),
        }
    }
}

fn functions(compute_network: HMODULE, vm_compute: Option<HMODULE>) -> Functions {
    let free: FreeFunction = free;
    // SAFETY: the signatures are those of the documentation (`functions`).
    let (create_endpoint, hns_call, register) = unsafe {
        (
            find(compute_network, "HcnCreateEndpoint"),
            vm_compute.and_then(|library| find(library, "HNSCall")),
            find(compute_network, "HcnRegisterServiceCallback"),
        )
    };
    Functions {
        network: object(compute_network, "Network", "Networks"),
        endpoint: object(compute_network, "Endpoint", "Endpoints"),
        namespace: object(compute_network, "Namespace", "Namespaces"),
        load_balancer: object(compute_network, "LoadBalancer", "LoadBalancers"),
        sdn_route: object(compute_network, "SdnRoute", "SdnRoutes"),
        guest_network_service: object(compute_network, "GuestNetworkService", "GuestNetworkServices"),
        create_endpoint,
        hns_call,
        register,
        free,
    }
}

/// # Safety
/// The memory was allocated by `CoTaskMemAlloc`, and is freed once.
unsafe extern "system" fn free(memory: *const std::ffi::c_void) {
    // SAFETY: see above.
    unsafe { CoTaskMemFree(memory) };
}
