//! The emulated HNS, and the handles that this process has.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use serde_json::json;
use tortie_hcn::{Address, Call, Failure, Guid, HResult, Hcn, Kind, RemoteHcn};

use crate::memory::Handle;
use crate::ports::Reserved;

/// The variable with the emulator's address.
const ADDRESS: &str = "TORTIE_HNS_ADDRESS";
/// No call of the emulator takes longer, unless a test wants it to.
const DEADLINE: Duration = Duration::from_secs(600);
/// `E_HANDLE`.
const INVALID_HANDLE: HResult = HResult(0x8007_0006);

/// The objects behind the open handles.
static HANDLES: Mutex<BTreeMap<usize, (Kind, Guid)>> = Mutex::new(BTreeMap::new());

pub(crate) fn call(call: &Call) -> Result<String, Failure> {
    static HNS: OnceLock<Option<RemoteHcn>> = OnceLock::new();
    let connect = || {
        let address: SocketAddr = std::env::var(ADDRESS).ok()?.parse().ok()?;
        Some(RemoteHcn::new(Address::Tcp(address), DEADLINE))
    };
    match HNS.get_or_init(connect) {
        Some(hns) => hns.call(call),
        None => Err(Failure::new(
            HResult::RPC_S_SERVER_UNAVAILABLE,
            format!("{ADDRESS} is not the address of an emulated HNS"),
        )),
    }
}

/// A call that only the emulator has.
pub(crate) fn emulator(name: &str, settings: &serde_json::Value) -> Result<String, Failure> {
    call(&Call::Emulator { name: name.to_owned(), settings: settings.to_string() })
}

/// Opens an object, which exists.
pub(crate) fn open(kind: Kind, id: Guid) -> Result<Handle, Failure> {
    let number = emulator("open", &json!({"Kind": kind, "Id": id}))?;
    let number: usize =
        number.parse().map_err(|_| Failure::new(HResult::E_FAIL, format!("{number:?} is no handle")))?;
    handles().insert(number, (kind, id));
    Ok(std::ptr::without_provenance_mut(number))
}

/// The object behind a handle.
pub(crate) fn object(kind: Kind, handle: Handle) -> Result<Guid, Failure> {
    match handles().get(&handle.addr()) {
        Some((found, id)) if *found == kind => Ok(*id),
        _ => Err(Failure::new(INVALID_HANDLE, format!("this is no open handle of a {kind}"))),
    }
}

/// Closes a handle. Others may be closed while HNS is away.
pub(crate) fn close(kind: Kind, handle: Handle) -> Result<(), Failure> {
    object(kind, handle)?;
    handles().remove(&handle.addr());
    emulator("close", &json!({"Handle": handle.addr()})).map(drop)
}

/// Opens the service itself.
pub(crate) fn open_service() -> Result<Handle, Failure> {
    let number = emulator("open-service", &json!({}))?;
    let number: usize =
        number.parse().map_err(|_| Failure::new(HResult::E_FAIL, format!("{number:?} is no handle")))?;
    Ok(std::ptr::without_provenance_mut(number))
}

/// Closes a handle of the service.
pub(crate) fn close_service(handle: Handle) -> Result<(), Failure> {
    invalid_handle(emulator("close-service", &json!({"Handle": handle.addr()})))
}

/// Reserves ports for a guest network service.
pub(crate) fn reserve(
    service: Handle,
    name: &str,
    mut wanted: serde_json::Value,
) -> Result<Reserved, Failure> {
    wanted["Service"] = json!(object(Kind::GuestNetworkService, service)?);
    let answer = emulator(name, &wanted)?;
    serde_json::from_str(&answer).map_err(|error| Failure::new(HResult::E_FAIL, error.to_string()))
}

/// Releases reserved ports.
pub(crate) fn release_ports(handle: Handle) -> Result<(), Failure> {
    invalid_handle(emulator("release-ports", &json!({"Handle": handle.addr()})))
}

/// The failure for a number that is no handle.
fn invalid_handle(answer: Result<String, Failure>) -> Result<(), Failure> {
    answer.map(drop).map_err(|failure| match failure.code {
        HResult::E_INVALIDARG => Failure::new(INVALID_HANDLE, failure.record),
        _ => failure,
    })
}

fn handles() -> MutexGuard<'static, BTreeMap<usize, (Kind, Guid)>> {
    HANDLES.lock().unwrap_or_else(PoisonError::into_inner)
}
