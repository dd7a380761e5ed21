//! The IP Helper API of this machine. Functions that change something or notify are looked up by name, because Wine lacks some.

use std::ffi::c_void;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

use ipnet::IpNet;
use tracing::warn;
use windows_sys::Win32::Foundation::{ERROR_BUFFER_OVERFLOW, ERROR_NOT_FOUND, HANDLE, NO_ERROR};
use windows_sys::Win32::NetworkManagement::IpHelper::{
    FreeMibTable, GAA_FLAG_SKIP_ANYCAST, GAA_FLAG_SKIP_DNS_SERVER, GAA_FLAG_SKIP_MULTICAST,
    GetAdaptersAddresses, GetIpForwardTable2, IP_ADAPTER_ADDRESSES_LH, IP_ADDRESS_PREFIX, MIB_IPFORWARD_ROW2,
    MIB_IPFORWARD_TABLE2, MIB_IPINTERFACE_ROW,
};
use windows_sys::Win32::NetworkManagement::Ndis::IfOperStatusUp;
use windows_sys::Win32::Networking::WinSock::{
    ADDRESS_FAMILY, AF_INET, AF_INET6, AF_UNSPEC, MIB_IPPROTO_LOCAL, MIB_IPPROTO_NETMGMT, NlroManual,
    SOCKADDR_INET,
};
use windows_sys::core::PWSTR;

use super::library::{find, load};
use crate::{Adapter, IpHelper, IpHelperError, IpRoute};

/// Room for the adapters of most machines, in bytes; the system says how much it needs.
const ROOM: u32 = 16 << 10;
/// How often the room may have been too small: adapters may appear meanwhile.
const ATTEMPTS: usize = 4;
/// A lifetime without end (`MIB_IPFORWARD_ROW2`).
const FOR_EVER: u32 = u32::MAX;

/// `CreateIpForwardEntry2` and `DeleteIpForwardEntry2`
type ChangeRoute = unsafe extern "system" fn(row: *const MIB_IPFORWARD_ROW2) -> u32;
/// `GetIpInterfaceEntry` and `SetIpInterfaceEntry`
type InterfaceEntry = unsafe extern "system" fn(row: *mut MIB_IPINTERFACE_ROW) -> u32;
/// `NotifyUnicastIpAddressChange` and `NotifyRouteChange2`. Only the type of the ignored second argument of the callback differs.
type Notify = unsafe extern "system" fn(
    family: u16,
    callback: unsafe extern "system" fn(context: *const c_void, row: *const c_void, kind: i32),
    context: *const c_void,
    initial: bool,
    handle: *mut HANDLE,
) -> u32;

/// The adapters and routes of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct NativeIpHelper;

impl IpHelper for NativeIpHelper {
    fn adapters(&self) -> Result<Vec<Adapter>, IpHelperError> {
        adapters().map_err(|source| IpHelperError { operation: "read the adapters", source })
    }

    fn routes(&self) -> Result<Vec<IpRoute>, IpHelperError> {
        routes().map_err(|source| IpHelperError { operation: "read the routes", source })
    }

    fn add_route(&self, route: &IpRoute) -> Result<(), IpHelperError> {
        add(route).map_err(|source| IpHelperError { operation: "add a route", source })
    }

    fn delete_route(&self, route: &IpRoute) -> Result<(), IpHelperError> {
        delete(route).map_err(|source| IpHelperError { operation: "delete a route", source })
    }

    fn enable_forwarding(&self, interface: u32, of_ipv6: bool) -> Result<(), IpHelperError> {
        enable_forwarding(interface, if of_ipv6 { AF_INET6 } else { AF_INET })
            .map_err(|source| IpHelperError { operation: "enable forwarding", source })
    }

    fn watch(&self, notify: Box<dyn Fn() + Send + Sync>) {
        let Ok(library) = load("iphlpapi.dll") else { return };
        // The registrations live as long as the process.
        let context = Box::into_raw(Box::new(notify)).cast_const().cast();
        for name in ["NotifyUnicastIpAddressChange", "NotifyRouteChange2"] {
            // SAFETY: both functions have this signature.
            let Some(register) = (unsafe { find::<Notify>(library, name) }) else {
                warn!(name, "this Windows does not notify of changes; they are found at intervals");
                continue;
            };
            let mut handle = ptr::null_mut();
            // SAFETY: the callback may be called from any thread, and the context is never freed.
            let code = unsafe { register(AF_UNSPEC, changed, context, false, &raw mut handle) };
            if code != NO_ERROR {
                let error = io::Error::from_raw_os_error(code as i32);
                warn!(name, %error, "no notifications of changes; they are found at intervals");
            }
        }
    }
}

/// # Safety
/// `context` is that of [`NativeIpHelper::watch`].
unsafe extern "system" fn changed(context: *const c_void, _: *const c_void, _: i32) {
    // SAFETY: see above; it is never freed.
    let notify = unsafe { &*context.cast::<Box<dyn Fn() + Send + Sync>>() };
    notify();
}

fn adapters() -> io::Result<Vec<Adapter>> {
    let mut room = ROOM;
    for _ in 0..ATTEMPTS {
        // The list has pointers and 64-bit numbers.
        let mut buffer = vec![0_u64; (room as usize).div_ceil(size_of::<u64>())];
        let first: *mut IP_ADAPTER_ADDRESSES_LH = buffer.as_mut_ptr().cast();
        let flags = GAA_FLAG_SKIP_ANYCAST | GAA_FLAG_SKIP_DNS_SERVER | GAA_FLAG_SKIP_MULTICAST;
        // SAFETY: the buffer has `room` bytes and is aligned; the reserved parameter is null.
        match unsafe { GetAdaptersAddresses(AF_UNSPEC.into(), flags, ptr::null(), first, &raw mut room) } {
            // SAFETY: the system has filled the buffer, which lives until the end of this function.
            NO_ERROR => return Ok(unsafe { read_adapters(first) }),
            ERROR_BUFFER_OVERFLOW => {}
            code => return Err(io::Error::from_raw_os_error(code as i32)),
        }
    }
    Err(io::Error::from_raw_os_error(ERROR_BUFFER_OVERFLOW as i32))
}

/// # Safety
/// The list is as `GetAdaptersAddresses` fills it.
unsafe fn read_adapters(mut next: *const IP_ADAPTER_ADDRESSES_LH) -> Vec<Adapter> {
    let mut adapters = Vec::new();
    // SAFETY: pointers of the list are null or valid.
    while let Some(adapter) = unsafe { next.as_ref() } {
        // SAFETY: as above; the union has the index in its common form.
        let (name, index, addresses) = unsafe {
            let index = adapter.Anonymous1.Anonymous.IfIndex;
            (text(adapter.FriendlyName), index, addresses(adapter))
        };
        let mac = (adapter.PhysicalAddressLength == 6).then(|| {
            let [a, b, c, d, e, f, ..] = adapter.PhysicalAddress;
            [a, b, c, d, e, f]
        });
        let is_up = adapter.OperStatus == IfOperStatusUp;
        // An adapter without IPv4 has its number for IPv6.
        let index = if index == 0 { adapter.Ipv6IfIndex } else { index };
        adapters.push(Adapter { index, name, mac, mtu: adapter.Mtu, is_up, addresses });
        next = adapter.Next;
    }
    adapters
}

/// # Safety
/// As [`read_adapters`].
unsafe fn addresses(adapter: &IP_ADAPTER_ADDRESSES_LH) -> Vec<IpNet> {
    let mut addresses = Vec::new();
    let mut next = adapter.FirstUnicastAddress;
    // SAFETY: pointers of the list are null or valid.
    while let Some(each) = unsafe { next.as_ref() } {
        // SAFETY: a socket address is as long as its family demands.
        let address =
            unsafe { each.Address.lpSockaddr.cast::<SOCKADDR_INET>().as_ref().and_then(|it| address(it)) };
        addresses.extend(address.and_then(|address| IpNet::new(address, each.OnLinkPrefixLength).ok()));
        next = each.Next;
    }
    addresses
}

/// # Safety
/// The union has the form of its family.
unsafe fn address(socket: &SOCKADDR_INET) -> Option<IpAddr> {
    // SAFETY: the family is at the same place in all forms, and decides which form it is.
    unsafe {
        match socket.si_family {
            AF_INET => Some(Ipv4Addr::from(socket.Ipv4.sin_addr.S_un.S_addr.to_ne_bytes()).into()),
            AF_INET6 => Some(Ipv6Addr::from(socket.Ipv6.sin6_addr.u.Byte).into()),
            _ => None,
        }
    }
}

/// # Safety
/// The text is null or ends with NUL.
unsafe fn text(text: PWSTR) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: see above.
    let units = unsafe {
        let length = (0..).take_while(|at| *text.add(*at) != 0).count();
        std::slice::from_raw_parts(text, length)
    };
    String::from_utf16_lossy(units)
}

fn routes() -> io::Result<Vec<IpRoute>> {
    let mut table: *mut MIB_IPFORWARD_TABLE2 = ptr::null_mut();
    // SAFETY: the place for the result is valid.
    let code = unsafe { GetIpForwardTable2(AF_UNSPEC, &raw mut table) };
    if code != NO_ERROR {
        return Err(io::Error::from_raw_os_error(code as i32));
    }
    // SAFETY: the system has allocated that many rows, and frees them afterwards.
    unsafe {
        let rows = (&raw const (*table).Table).cast::<MIB_IPFORWARD_ROW2>();
        let rows = std::slice::from_raw_parts(rows, (*table).NumEntries as usize);
        let routes = rows.iter().filter_map(|row| route(row)).collect();
        FreeMibTable(table.cast());
        Ok(routes)
    }
}

/// # Safety
/// The addresses of the row have the forms of their families.
unsafe fn route(row: &MIB_IPFORWARD_ROW2) -> Option<IpRoute> {
    // SAFETY: see above.
    let (prefix, next_hop) = unsafe { (address(&row.DestinationPrefix.Prefix)?, address(&row.NextHop)) };
    let destination = IpNet::new(prefix, row.DestinationPrefix.PrefixLength).ok()?.trunc();
    let on_link = match destination {
        IpNet::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpNet::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    Some(IpRoute {
        interface: row.InterfaceIndex,
        destination,
        next_hop: next_hop.unwrap_or(on_link),
        metric: row.Metric,
        is_own: row.Protocol == MIB_IPPROTO_LOCAL || row.Origin != NlroManual,
    })
}

fn add(route: &IpRoute) -> io::Result<()> {
    change_route("CreateIpForwardEntry2", route)
}

fn delete(route: &IpRoute) -> io::Result<()> {
    match change_route("DeleteIpForwardEntry2", route) {
        Err(error) if error.raw_os_error() == Some(ERROR_NOT_FOUND as i32) => Ok(()),
        result => result,
    }
}

fn change_route(function: &str, route: &IpRoute) -> io::Result<()> {
    let library = load("iphlpapi.dll").map_err(|error| error.source)?;
    // SAFETY: both functions have this signature.
    let change: ChangeRoute = unsafe { find(library, function) }.ok_or(io::ErrorKind::Unsupported)?;
    let row = MIB_IPFORWARD_ROW2 {
        InterfaceIndex: route.interface,
        DestinationPrefix: IP_ADDRESS_PREFIX {
            Prefix: socket_address(route.destination.addr()),
            PrefixLength: route.destination.prefix_len(),
        },
        NextHop: socket_address(route.next_hop),
        ValidLifetime: FOR_EVER,
        PreferredLifetime: FOR_EVER,
        Metric: route.metric,
        Protocol: MIB_IPPROTO_NETMGMT,
        ..Default::default()
    };
    // SAFETY: the row is complete, and is only read.
    match unsafe { change(&raw const row) } {
        NO_ERROR => Ok(()),
        code => Err(io::Error::from_raw_os_error(code as i32)),
    }
}

fn enable_forwarding(interface: u32, family: ADDRESS_FAMILY) -> io::Result<()> {
    let library = load("iphlpapi.dll").map_err(|error| error.source)?;
    let function = |name| {
        // SAFETY: both functions have this signature.
        let function: Option<InterfaceEntry> = unsafe { find(library, name) };
        function.ok_or(io::ErrorKind::Unsupported)
    };
    let (get, set) = (function("GetIpInterfaceEntry")?, function("SetIpInterfaceEntry")?);
    let mut row = MIB_IPINTERFACE_ROW { Family: family, InterfaceIndex: interface, ..Default::default() };
    let outcome = |code| match code {
        NO_ERROR => Ok(()),
        code => Err(io::Error::from_raw_os_error(code as i32)),
    };
    // SAFETY: family and number name the row, which the function fills.
    outcome(unsafe { get(&raw mut row) })?;
    if row.ForwardingEnabled {
        return Ok(());
    }
    row.ForwardingEnabled = true;
    if family == AF_INET {
        // SetIpInterfaceEntry refuses the value that GetIpInterfaceEntry gives for IPv4.
        row.SitePrefixLength = 0;
    }
    // SAFETY: the row is complete.
    outcome(unsafe { set(&raw mut row) })
}

fn socket_address(address: IpAddr) -> SOCKADDR_INET {
    let mut socket = SOCKADDR_INET::default();
    match address {
        IpAddr::V4(address) => {
            socket.Ipv4.sin_family = AF_INET;
            socket.Ipv4.sin_addr.S_un.S_addr = u32::from_ne_bytes(address.octets());
        }
        IpAddr::V6(address) => {
            socket.Ipv6.sin6_family = AF_INET6;
            socket.Ipv6.sin6_addr.u.Byte = address.octets();
        }
    }
    socket
}
