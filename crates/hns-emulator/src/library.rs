//! What a client's library needs beyond calls: handles, which it opens and closes, reservations of ports, and notifications. The
//! library for Wine (`hns-dll`) asks for them by calls of the emulator.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;
use tortie_hcn::schema::GuestNetworkService;
use tortie_hcn::{Call, Failure, Guid, HResult, Hcn, Kind};

use crate::check::fail;
use crate::port_reservations::{PortRequest, PortReservations, RangeRequest, Reservation};
use crate::v1::V1;

/// `HcnNotificationNetworkCreate` and its relatives.
const NETWORK_CREATE: u32 = 2;
const NETWORK_DELETE: u32 = 4;
const NAMESPACE_CREATE: u32 = 5;
const NAMESPACE_DELETE: u32 = 6;
const GUEST_NETWORK_SERVICE_CREATE: u32 = 7;
const GUEST_NETWORK_SERVICE_DELETE: u32 = 8;
const GUEST_NETWORK_SERVICE_STATE_CHANGED: u32 = 0x11;
const SERVICE_DISCONNECT: u32 = 0x0100_0000;

/// How long a library waits for a notification before it asks again.
const PATIENCE: Duration = Duration::from_secs(5);
/// The number of notifications that are kept for libraries that are slow.
const KEPT: usize = 1_024;

/// An HNS for libraries.
pub struct LibraryService {
    hns: Arc<dyn Hcn>,
    v1: V1,
    state: Mutex<LibraryState>,
    notified: Condvar,
}

#[derive(Default)]
struct LibraryState {
    open: BTreeMap<u64, (Kind, Guid)>,
    /// The open handles of the service itself.
    services: BTreeSet<u64>,
    ports: PortReservations,
    /// The number of handles so far, which is the newest handle.
    opened: u64,
    notifications: VecDeque<Notification>,
    /// The number of notifications so far.
    sent: u64,
}

#[derive(Clone, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Notification {
    r#type: u32,
    data: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Object {
    kind: Kind,
    id: Guid,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct OpenHandle {
    handle: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Since {
    next: Option<u64>,
}

/// A request about a container.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ContainerRequest {
    id: String,
    #[serde(default)]
    request: String,
}

impl LibraryService {
    /// Adds handles and notifications to an HNS.
    pub fn new(hns: Arc<dyn Hcn>) -> LibraryService {
        LibraryService { hns, v1: V1::default(), state: Mutex::default(), notified: Condvar::new() }
    }

    /// The open handles: of which objects.
    pub fn open_handles(&self) -> Vec<(Kind, Guid)> {
        self.state().open.values().copied().collect()
    }

    /// How many handles of the service itself are open.
    pub fn open_services(&self) -> usize {
        self.state().services.len()
    }

    /// How many handles of reservations of ports are open.
    pub fn open_reservations(&self) -> usize {
        self.state().ports.count()
    }

    /// How many handles were ever opened.
    pub fn opened(&self) -> u64 {
        self.state().opened
    }

    /// Tells that a container runs, to which the old interface can attach endpoints.
    pub fn start_container(&self, id: &str) {
        self.v1.containers.start(id);
    }

    /// Tells that a container has ended. Its endpoints are detached, unless other containers share them.
    ///
    /// # Errors
    /// No such container runs, or HNS does not answer.
    pub fn stop_container(&self, id: &str) -> Result<(), Failure> {
        self.v1.containers.stop(self, id)
    }

    /// Tells all libraries that HNS has ended, as a restart of HNS does. Their handles are gone.
    pub fn disconnect(&self) {
        let mut state = self.state();
        state.open.clear();
        state.services.clear();
        state.ports = PortReservations::default();
        drop(state);
        self.notify(SERVICE_DISCONNECT, Guid::ZERO);
    }

    fn notify(&self, kind: u32, id: Guid) {
        let mut state = self.state();
        state.sent += 1;
        let data = json!({"ID": id, "Flags": 0}).to_string();
        state.notifications.push_back(Notification { r#type: kind, data });
        if state.notifications.len() > KEPT {
            state.notifications.pop_front();
        }
        self.notified.notify_all();
    }

    fn open(&self, Object { kind, id }: &Object) -> Result<String, Failure> {
        // It must exist.
        self.hns.call(&Call::Query { kind: *kind, id: *id, query: String::new() })?;
        let mut state = self.state();
        state.opened += 1;
        let handle = state.opened;
        state.open.insert(handle, (*kind, *id));
        Ok(handle.to_string())
    }

    /// Reserves ports for a guest network service, which exists.
    fn reserve(
        &self,
        service: Guid,
        find: impl Fn(&PortReservations, Guid) -> Result<Reservation, Failure>,
    ) -> Result<String, Failure> {
        let query = Call::Query { kind: Kind::GuestNetworkService, id: service, query: String::new() };
        let found: GuestNetworkService = read(&self.hns.call(&query)?)?;
        let mut state = self.state();
        let reservation = find(&state.ports, found.virtual_machine_id)?;
        state.opened += 1;
        let handle = state.opened;
        let Reservation { starting_port, ending_port, .. } = reservation;
        state.ports.open(handle, reservation);
        Ok(json!({"Handle": handle, "StartingPort": starting_port, "EndingPort": ending_port}).to_string())
    }

    fn port_reservations(&self) -> String {
        json!(self.state().ports.all().collect::<Vec<_>>()).to_string()
    }

    fn close(&self, OpenHandle { handle }: &OpenHandle) -> Result<String, Failure> {
        match self.state().open.remove(handle) {
            Some(_) => Ok(String::new()),
            None => fail(HResult::E_INVALIDARG, format!("{handle} is no open handle")),
        }
    }

    /// The notifications from that one on; waits for one for a while.
    fn notifications(&self, Since { next }: &Since) -> String {
        let state = self.state();
        let state = match next {
            None => state,
            Some(next) => {
                let waited = self.notified.wait_timeout_while(state, PATIENCE, |state| state.sent <= *next);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        let missing = next.map_or(0, |next| state.sent.saturating_sub(next));
        let missing = usize::try_from(missing).unwrap_or(usize::MAX);
        let skipped = state.notifications.len().saturating_sub(missing);
        let new: Vec<&Notification> = state.notifications.iter().skip(skipped).collect();
        json!({"Next": state.sent, "Notifications": new}).to_string()
    }

    fn state(&self) -> MutexGuard<'_, LibraryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hcn for LibraryService {
    fn call(&self, call: &Call) -> Result<String, Failure> {
        if let Call::Emulator { name, settings } = call {
            match name.as_str() {
                "open" => return self.open(&read(settings)?),
                "open-service" => {
                    let mut state = self.state();
                    state.opened += 1;
                    let handle = state.opened;
                    state.services.insert(handle);
                    return Ok(handle.to_string());
                }
                "close-service" => {
                    let OpenHandle { handle } = read(settings)?;
                    return match self.state().services.remove(&handle) {
                        true => Ok(String::new()),
                        false => {
                            fail(HResult::E_INVALIDARG, format!("{handle} is no open handle of the service"))
                        }
                    };
                }
                "close" => return self.close(&read(settings)?),
                "reserve-port" => {
                    let request: PortRequest = read(settings)?;
                    return self.reserve(request.service, |ports, machine| ports.port(&request, machine));
                }
                "reserve-ports" => {
                    let request: RangeRequest = read(settings)?;
                    return self.reserve(request.service, |ports, machine| ports.range(&request, machine));
                }
                "release-ports" => {
                    let OpenHandle { handle } = read(settings)?;
                    return self.state().ports.release(handle).map(|()| String::new());
                }
                "port-reservations" => return Ok(self.port_reservations()),
                "notifications" => return Ok(self.notifications(&read(settings)?)),
                "hns-call" => return Ok(self.v1.answer(self, &read(settings)?).to_string()),
                "open-container" => {
                    let ContainerRequest { id, .. } = read(settings)?;
                    return self.v1.containers.namespace(&id).map(|_| String::new());
                }
                "modify-container" => {
                    let ContainerRequest { id, request } = read(settings)?;
                    return self.v1.containers.modify(self, &id, &request).map(|()| String::new());
                }
                _ => {}
            }
        }
        let answer = self.hns.call(call)?;
        match call {
            Call::Create { kind: Kind::Network, .. } => self.notify(NETWORK_CREATE, created(&answer)),
            Call::Create { kind: Kind::Namespace, .. } => self.notify(NAMESPACE_CREATE, created(&answer)),
            Call::Delete { kind: Kind::Network, id } => self.notify(NETWORK_DELETE, *id),
            Call::Delete { kind: Kind::Namespace, id } => self.notify(NAMESPACE_DELETE, *id),
            Call::Create { kind: Kind::GuestNetworkService, .. } => {
                self.notify(GUEST_NETWORK_SERVICE_CREATE, created(&answer));
            }
            Call::Modify { kind: Kind::GuestNetworkService, id, .. } => {
                self.notify(GUEST_NETWORK_SERVICE_STATE_CHANGED, *id);
            }
            Call::Delete { kind: Kind::GuestNetworkService, id } => {
                self.state().ports.end(*id);
                self.notify(GUEST_NETWORK_SERVICE_DELETE, *id);
            }
            _ => {}
        }
        Ok(answer)
    }
}

fn created(answer: &str) -> Guid {
    serde_json::from_str(answer).unwrap_or_default()
}

fn read<T: for<'a> Deserialize<'a>>(settings: &str) -> Result<T, Failure> {
    serde_json::from_str(settings)
        .map_err(|error| Failure::new(HResult::HCN_E_INVALID_JSON, error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use serde_json::Value;
    use tortie_hcn::HcnExt;
    use tortie_hcn::schema::Namespace;

    use super::*;
    use crate::{Config, Emulator};

    fn ask(service: &LibraryService, name: &str, settings: &Value) -> Result<String, Failure> {
        service.call(&Call::Emulator { name: name.to_owned(), settings: settings.to_string() })
    }

    #[test]
    fn handles_and_notifications() {
        let hns = Emulator::new(Config::new(Config::NEWEST, Ipv4Addr::LOCALHOST));
        let service = LibraryService::new(Arc::new(hns));
        let notifications = |next: Option<u64>| -> Value {
            serde_json::from_str(&ask(&service, "notifications", &json!({"Next": next})).unwrap()).unwrap()
        };
        assert_eq!(notifications(None), json!({"Next": 0, "Notifications": []}));
        let id = service.create_namespace(&Namespace::default()).unwrap();
        let handle = ask(&service, "open", &json!({"Kind": "Namespace", "Id": id})).unwrap();
        assert_eq!((service.open_handles(), service.opened()), (vec![(Kind::Namespace, id)], 1));
        let absent = ask(&service, "open", &json!({"Kind": "Namespace", "Id": Guid::random()}));
        assert_eq!(absent.unwrap_err().code, HResult::ERROR_NOT_FOUND);
        let handle: u64 = handle.parse().unwrap();
        ask(&service, "close", &json!({"Handle": handle})).unwrap();
        assert!(ask(&service, "close", &json!({"Handle": handle})).is_err(), "a handle is closed once");
        service.delete_namespace(id).unwrap();
        service.disconnect();
        let answer = notifications(Some(1));
        let types: Vec<_> =
            answer["Notifications"].as_array().unwrap().iter().map(|n| n["Type"].clone()).collect();
        assert_eq!((&answer["Next"], types), (&json!(3), vec![json!(6), json!(SERVICE_DISCONNECT)]));
        let all = notifications(Some(0))["Notifications"].as_array().map(Vec::len);
        assert_eq!(all, Some(3));
    }
}
