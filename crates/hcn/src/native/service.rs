//! A process that Windows' service manager starts and stops.

use std::ffi::c_void;
use std::io;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use windows_sys::Win32::Foundation::{ERROR_CALL_NOT_IMPLEMENTED, ERROR_SERVICE_SPECIFIC_ERROR, NO_ERROR};
use windows_sys::Win32::System::Services::{
    RegisterServiceCtrlHandlerExW, SERVICE_ACCEPT_SHUTDOWN, SERVICE_ACCEPT_STOP, SERVICE_CONTROL_INTERROGATE,
    SERVICE_CONTROL_SHUTDOWN, SERVICE_CONTROL_STOP, SERVICE_RUNNING, SERVICE_STATUS, SERVICE_STATUS_HANDLE,
    SERVICE_STOP_PENDING, SERVICE_STOPPED, SERVICE_TABLE_ENTRYW, SERVICE_WIN32_OWN_PROCESS, SetServiceStatus,
    StartServiceCtrlDispatcherW,
};

/// The stack of the thread that runs the service. The service manager's own thread has less than a program's main thread.
const STACK: usize = 8 << 20;
/// How long the end of the service may take.
const STOP_TIME_MS: u32 = 30_000;

/// The service of this process.
struct Service {
    /// Runs until it is asked to stop, and returns whether it went well.
    work: Option<Box<dyn FnOnce() -> bool + Send>>,
    stop: Option<Box<dyn Fn() + Send + Sync>>,
}

static SERVICE: Mutex<Service> = Mutex::new(Service { work: None, stop: None });

/// Runs `work` as the service that this process was started for; `stop` is called when the service manager wants its end.
/// Returns when the service has stopped.
///
/// # Errors
/// The service manager has not started this process.
pub fn run_service(
    work: impl FnOnce() -> bool + Send + 'static,
    stop: impl Fn() + Send + Sync + 'static,
) -> io::Result<()> {
    *SERVICE.lock().unwrap_or_else(PoisonError::into_inner) =
        Service { work: Some(Box::new(work)), stop: Some(Box::new(stop)) };
    // The name has no meaning for a process with one service.
    let mut name = [0_u16];
    let table = [
        SERVICE_TABLE_ENTRYW { lpServiceName: name.as_mut_ptr(), lpServiceProc: Some(main) },
        SERVICE_TABLE_ENTRYW { lpServiceName: std::ptr::null_mut(), lpServiceProc: None },
    ];
    // SAFETY: the table ends with an empty entry, and lives as long as the call.
    if unsafe { StartServiceCtrlDispatcherW(table.as_ptr()) } == 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// What the handler of the service manager's wishes needs.
struct Control {
    stop: Box<dyn Fn() + Send + Sync>,
    /// Null until the handler is registered.
    manager: AtomicPtr<c_void>,
}

unsafe extern "system" fn main(_: u32, _: *mut *mut u16) {
    let (work, stop) = {
        let mut service = SERVICE.lock().unwrap_or_else(PoisonError::into_inner);
        (service.work.take(), service.stop.take())
    };
    let (Some(work), Some(stop)) = (work, stop) else { return };
    // The service manager may call the handler until the process ends.
    let context: &'static Control = Box::leak(Box::new(Control { stop, manager: AtomicPtr::default() }));
    let name = [0_u16];
    // SAFETY: the name ends with NUL, and the context lives for ever.
    let manager = unsafe {
        RegisterServiceCtrlHandlerExW(name.as_ptr(), Some(control), std::ptr::from_ref(context).cast())
    };
    if manager.is_null() {
        return;
    }
    context.manager.store(manager, Ordering::Release);
    tell(manager, SERVICE_RUNNING, NO_ERROR);
    let thread = std::thread::Builder::new().name("service".to_owned()).stack_size(STACK).spawn(work);
    // The thread has already printed a panic.
    let went_well = thread.is_ok_and(|thread| thread.join().unwrap_or(false));
    tell(manager, SERVICE_STOPPED, if went_well { NO_ERROR } else { ERROR_SERVICE_SPECIFIC_ERROR });
}

/// # Safety
/// `context` is the [`Control`] of [`main`].
unsafe extern "system" fn control(control: u32, _: u32, _: *mut c_void, context: *mut c_void) -> u32 {
    match control {
        SERVICE_CONTROL_STOP | SERVICE_CONTROL_SHUTDOWN => {
            // SAFETY: see above; it lives for ever.
            let context = unsafe { &*context.cast::<Control>() };
            let manager = context.manager.load(Ordering::Acquire);
            if !manager.is_null() {
                // The agent may need a while to end.
                tell(manager, SERVICE_STOP_PENDING, NO_ERROR);
            }
            (context.stop)();
            NO_ERROR
        }
        SERVICE_CONTROL_INTERROGATE => NO_ERROR,
        _ => ERROR_CALL_NOT_IMPLEMENTED,
    }
}

fn tell(manager: SERVICE_STATUS_HANDLE, state: u32, code: u32) {
    let is_running = state == SERVICE_RUNNING;
    let status = SERVICE_STATUS {
        dwServiceType: SERVICE_WIN32_OWN_PROCESS,
        dwCurrentState: state,
        dwControlsAccepted: if is_running { SERVICE_ACCEPT_STOP | SERVICE_ACCEPT_SHUTDOWN } else { 0 },
        dwWin32ExitCode: code,
        dwServiceSpecificExitCode: u32::from(code != NO_ERROR),
        dwCheckPoint: 0,
        dwWaitHint: if state == SERVICE_STOP_PENDING { STOP_TIME_MS } else { 0 },
    };
    // SAFETY: the manager's handle stays valid, and the status lives as long as the call. Without success, nobody is there
    // to be told.
    unsafe { SetServiceStatus(manager, &raw const status) };
}
