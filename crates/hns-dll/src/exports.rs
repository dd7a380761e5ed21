//! The exported functions (`api/hcn/Reference` of Microsoft's Virtualization-Documentation; `hcn` of hcsshim).
//!
//! All pointers are as that documentation says: texts end with NUL, and places for results are valid or null.
#![allow(non_snake_case, reason = "the names are those of Windows")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use serde_json::json;
use tortie_hcn::{Call, Failure, HResult, Kind};

use crate::callbacks::{self, Callback};
use crate::client;
use crate::guid::RawGuid;
use crate::memory::{Handle, Text, give, give_text, guid, outcome, text};
use crate::ports::{self, PortRange, PortRangeEntry, Reserved};

/// The functions of one kind of object, except for Create.
macro_rules! object {
    ($kind:expr, $enumerate:ident, $open:ident, $modify:ident, $query:ident, $delete:ident, $close:ident) => {
        /// Returns the identifiers of the objects that a query selects.
        ///
        /// # Safety
        /// The pointers are as documented.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "system" fn $enumerate(
            query: *const u16,
            ids: *mut Text,
            record: *mut Text,
        ) -> i32 {
            // SAFETY: the pointers are as documented.
            unsafe {
                let found = client::call(&Call::Enumerate { kind: $kind, query: text(query) });
                outcome(found.map(|found| give_text(ids, &found)), record)
            }
        }

        /// Opens an object.
        ///
        /// # Safety
        /// The pointers are as documented.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "system" fn $open(
            id: *const RawGuid,
            handle: *mut Handle,
            record: *mut Text,
        ) -> i32 {
            // SAFETY: the pointers are as documented.
            unsafe { outcome(client::open($kind, guid(id)).map(|opened| give(handle, opened)), record) }
        }

        /// Changes an object.
        ///
        /// # Safety
        /// The pointers are as documented.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "system" fn $modify(
            handle: Handle,
            settings: *const u16,
            record: *mut Text,
        ) -> i32 {
            // SAFETY: the pointers are as documented.
            unsafe {
                let settings = text(settings);
                let modify = |id| client::call(&Call::Modify { kind: $kind, id, settings });
                outcome(client::object($kind, handle).and_then(modify).map(drop), record)
            }
        }

        /// Returns an object's document.
        ///
        /// # Safety
        /// The pointers are as documented.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "system" fn $query(
            handle: Handle,
            query: *const u16,
            properties: *mut Text,
            record: *mut Text,
        ) -> i32 {
            // SAFETY: the pointers are as documented.
            unsafe {
                let query = text(query);
                let read = |id| client::call(&Call::Query { kind: $kind, id, query });
                let found = client::object($kind, handle).and_then(read);
                outcome(found.map(|found| give_text(properties, &found)), record)
            }
        }

        /// Deletes an object.
        ///
        /// # Safety
        /// The pointers are as documented.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "system" fn $delete(id: *const RawGuid, record: *mut Text) -> i32 {
            // SAFETY: the pointers are as documented.
            unsafe { outcome(client::call(&Call::Delete { kind: $kind, id: guid(id) }).map(drop), record) }
        }

        /// Closes a handle. The object stays.
        ///
        /// # Safety
        /// None.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "system" fn $close(handle: Handle) -> i32 {
            // SAFETY: nobody wants an error record.
            unsafe { outcome(client::close($kind, handle), std::ptr::null_mut()) }
        }
    };
}

object!(
    Kind::Network,
    HcnEnumerateNetworks,
    HcnOpenNetwork,
    HcnModifyNetwork,
    HcnQueryNetworkProperties,
    HcnDeleteNetwork,
    HcnCloseNetwork
);
object!(
    Kind::Endpoint,
    HcnEnumerateEndpoints,
    HcnOpenEndpoint,
    HcnModifyEndpoint,
    HcnQueryEndpointProperties,
    HcnDeleteEndpoint,
    HcnCloseEndpoint
);
object!(
    Kind::Namespace,
    HcnEnumerateNamespaces,
    HcnOpenNamespace,
    HcnModifyNamespace,
    HcnQueryNamespaceProperties,
    HcnDeleteNamespace,
    HcnCloseNamespace
);
object!(
    Kind::LoadBalancer,
    HcnEnumerateLoadBalancers,
    HcnOpenLoadBalancer,
    HcnModifyLoadBalancer,
    HcnQueryLoadBalancerProperties,
    HcnDeleteLoadBalancer,
    HcnCloseLoadBalancer
);

object!(
    Kind::SdnRoute,
    HcnEnumerateSdnRoutes,
    HcnOpenSdnRoute,
    HcnModifySdnRoute,
    HcnQuerySdnRouteProperties,
    HcnDeleteSdnRoute,
    HcnCloseSdnRoute
);

object!(
    Kind::GuestNetworkService,
    HcnEnumerateGuestNetworkServices,
    HcnOpenGuestNetworkService,
    HcnModifyGuestNetworkService,
    HcnQueryGuestNetworkServiceProperties,
    HcnDeleteGuestNetworkService,
    HcnCloseGuestNetworkService
);

/// Questions about an endpoint that have functions of their own. Their query selects nothing.
macro_rules! about_endpoint {
    ($function:ident, $call:expr) => {
        /// Returns what the emulated HNS knows of an endpoint.
        ///
        /// # Safety
        /// The pointers are as documented.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "system" fn $function(
            handle: Handle,
            _query: *const u16,
            answer: *mut Text,
            record: *mut Text,
        ) -> i32 {
            let ask = |id| client::emulator($call, &json!({ "Id": id }));
            let found = client::object(Kind::Endpoint, handle).and_then(ask);
            // SAFETY: the pointers are as documented.
            unsafe { outcome(found.map(|found| give_text(answer, &found)), record) }
        }
    };
}

about_endpoint!(HcnQueryEndpointStats, "endpoint-stats");
about_endpoint!(HcnQueryEndpointAddresses, "endpoint-addresses");

/// Opens the service itself (SDN scripts, `hns.v2.psm1`).
///
/// # Safety
/// The pointers are as documented.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcnOpenService(handle: *mut Handle, record: *mut Text) -> i32 {
    // SAFETY: the pointers are as documented.
    unsafe { outcome(client::open_service().map(|opened| give(handle, opened)), record) }
}

/// Closes a handle of the service.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcnCloseService(handle: Handle) -> i32 {
    // SAFETY: nobody wants an error record.
    unsafe { outcome(client::close_service(handle), std::ptr::null_mut()) }
}

macro_rules! create {
    ($kind:expr, $create:ident) => {
        /// Creates an object.
        ///
        /// # Safety
        /// The pointers are as documented.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "system" fn $create(
            id: *const RawGuid,
            settings: *const u16,
            handle: *mut Handle,
            record: *mut Text,
        ) -> i32 {
            // SAFETY: the pointers are as documented.
            unsafe { create($kind, std::ptr::null_mut(), id, settings, handle, record) }
        }
    };
}

create!(Kind::Network, HcnCreateNetwork);
create!(Kind::Namespace, HcnCreateNamespace);
create!(Kind::LoadBalancer, HcnCreateLoadBalancer);
create!(Kind::SdnRoute, HcnCreateSdnRoute);
create!(Kind::GuestNetworkService, HcnCreateGuestNetworkService);

/// Creates an endpoint in a network.
///
/// # Safety
/// The pointers are as documented.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcnCreateEndpoint(
    network: Handle,
    id: *const RawGuid,
    settings: *const u16,
    handle: *mut Handle,
    record: *mut Text,
) -> i32 {
    // SAFETY: the pointers are as documented.
    unsafe { create(Kind::Endpoint, network, id, settings, handle, record) }
}

/// # Safety
/// The pointers are as documented.
unsafe fn create(
    kind: Kind,
    network: Handle,
    id: *const RawGuid,
    settings: *const u16,
    handle: *mut Handle,
    record: *mut Text,
) -> i32 {
    // SAFETY: the pointers are as documented.
    let (id, settings) = unsafe { (guid(id), text(settings)) };
    let create = || {
        let network = match kind {
            Kind::Endpoint => client::object(Kind::Network, network)?,
            Kind::Network
            | Kind::Namespace
            | Kind::LoadBalancer
            | Kind::SdnRoute
            | Kind::GuestNetworkService => tortie_hcn::Guid::ZERO,
        };
        let created = client::call(&Call::Create { kind, network, id, settings })?;
        let id = serde_json::from_str(&created)
            .map_err(|error| Failure::new(HResult::E_FAIL, format!("{created} is no identifier: {error}")))?;
        client::open(kind, id)
    };
    // SAFETY: the pointers are as documented.
    unsafe { outcome(create().map(|opened| give(handle, opened)), record) }
}

/// Registers a callback for notifications.
///
/// # Safety
/// The pointers are as documented.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcnRegisterServiceCallback(
    callback: Callback,
    context: *const c_void,
    handle: *mut Handle,
) -> i32 {
    let registered = callbacks::register(callback, context, None);
    // SAFETY: the place is valid or null; nobody wants an error record.
    unsafe { outcome(registered.map(|registered| give(handle, registered)), std::ptr::null_mut()) }
}

/// Ends the registration of a callback.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcnUnregisterServiceCallback(handle: Handle) -> i32 {
    callbacks::unregister(handle);
    0
}

/// The old interface (`vmcompute.dll`): a method and a path.
///
/// # Safety
/// The pointers are as documented.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HNSCall(
    method: *const u16,
    path: *const u16,
    request: *const u16,
    response: *mut Text,
) -> i32 {
    // SAFETY: the pointers are as documented.
    let (method, path, request) = unsafe { (text(method), text(path), text(request)) };
    let answer = client::emulator("hns-call", &json!({"Method": method, "Path": path, "Request": request}));
    // SAFETY: the place is valid or null; nobody wants an error record.
    unsafe { outcome(answer.map(|answer| give_text(response, &answer)), std::ptr::null_mut()) }
}

/// Registers a callback for the notifications of a guest network service.
///
/// # Safety
/// The pointers are as documented.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcnRegisterGuestNetworkServiceCallback(
    service: Handle,
    callback: Callback,
    context: *const c_void,
    handle: *mut Handle,
) -> i32 {
    let id = client::object(Kind::GuestNetworkService, service);
    let registered = id.and_then(|id| callbacks::register(callback, context, Some(id)));
    // SAFETY: the place is valid or null; nobody wants an error record.
    unsafe { outcome(registered.map(|registered| give(handle, registered)), std::ptr::null_mut()) }
}

/// Ends the registration of a callback of a guest network service.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcnUnregisterGuestNetworkServiceCallback(handle: Handle) -> i32 {
    callbacks::unregister(handle);
    0
}

/// Reserves a port of the node for a guest network service.
///
/// # Safety
/// The pointers are as documented.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcnReserveGuestNetworkServicePort(
    service: Handle,
    protocol: u32,
    access: u32,
    port: u16,
    handle: *mut Handle,
) -> i32 {
    let wanted = json!({"Protocol": protocol, "Access": access, "Port": port});
    let reserved = client::reserve(service, "reserve-port", wanted);
    let opened = reserved.map(|reserved| std::ptr::without_provenance_mut(reserved.handle));
    // SAFETY: the place is valid or null; nobody wants an error record.
    unsafe { outcome(opened.map(|opened| give(handle, opened)), std::ptr::null_mut()) }
}

/// Reserves ports of the node in a row for a guest network service.
///
/// # Safety
/// The pointers are as documented.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcnReserveGuestNetworkServicePortRange(
    service: Handle,
    count: u16,
    range: *mut PortRange,
    handle: *mut Handle,
) -> i32 {
    let reserved = client::reserve(service, "reserve-ports", json!({"Count": count}));
    // SAFETY: the places are valid or null; nobody wants an error record.
    unsafe {
        let give_both = |reserved: Reserved| {
            give(range, reserved.range());
            give(handle, std::ptr::without_provenance_mut(reserved.handle));
        };
        outcome(reserved.map(give_both), std::ptr::null_mut())
    }
}

/// Releases reserved ports.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcnReleaseGuestNetworkServicePortReservationHandle(
    handle: Handle,
) -> i32 {
    // SAFETY: nobody wants an error record.
    unsafe { outcome(client::release_ports(handle), std::ptr::null_mut()) }
}

/// The lists that callers have not freed yet, by their addresses.
static LISTS: Mutex<BTreeMap<usize, Box<[PortRangeEntry]>>> = Mutex::new(BTreeMap::new());

/// Returns all reservations of ports. The caller frees the list by [`HcnFreeGuestNetworkPortReservations`].
///
/// # Safety
/// The pointers are as documented.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcnEnumerateGuestNetworkPortReservations(
    count: *mut u32,
    list: *mut *mut PortRangeEntry,
) -> i32 {
    let read = |answer: String| {
        ports::entries(&answer).map_err(|error| Failure::new(HResult::E_FAIL, error.to_string()))
    };
    let listed = client::emulator("port-reservations", &json!({})).and_then(read);
    let keep = |mut entries: Box<[PortRangeEntry]>| {
        let (length, first) = (entries.len() as u32, entries.as_mut_ptr());
        let mut lists = LISTS.lock().unwrap_or_else(PoisonError::into_inner);
        // Nothing is allocated for an empty list.
        let first = if entries.is_empty() { std::ptr::null_mut() } else { first };
        lists.insert(first.addr(), entries);
        (length, first)
    };
    // SAFETY: the places are valid or null; nobody wants an error record.
    unsafe {
        let give_both = |(length, first)| {
            give(count, length);
            give(list, first);
        };
        outcome(listed.map(keep).map(give_both), std::ptr::null_mut())
    }
}

/// Frees a list of reservations.
///
/// # Safety
/// Nobody uses the list any more.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn HcnFreeGuestNetworkPortReservations(list: *mut PortRangeEntry) {
    LISTS.lock().unwrap_or_else(PoisonError::into_inner).remove(&list.addr());
}
