//! The emulated HNS as a service: objects outlive clients, and a restarted service takes over the socket.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use tortie_hcn::schema::{Namespace, RequestType};
use tortie_hcn::{Address, Class, Guid, HcnExt, RemoteHcn};
use tortie_hns_emulator::{Config, Emulator, ServiceConfig, bind_compartment, run_service};
use tortie_kernel::namespace::NetNs;

fn client(socket: &Path) -> RemoteHcn {
    RemoteHcn::new(Address::Unix(socket.to_owned()), Duration::from_secs(20))
}

fn config() -> Config {
    Config::new(Config::NEWEST, Ipv4Addr::LOCALHOST)
}

#[test]
fn objects_outlive_clients() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("hns.sock");
    // A service that was killed left its socket.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let service = ServiceConfig { hns: config(), socket: socket.clone(), libraries: None };
    let node = NetNs::create().unwrap();
    let again = service.clone();
    std::thread::spawn(move || node.run(|| run_service(service)).unwrap().unwrap());
    let deadline = Instant::now() + Duration::from_secs(20);
    while client(&socket).version().is_err() {
        assert!(Instant::now() < deadline, "the service does not answer");
        std::thread::yield_now();
    }
    let id = client(&socket).create_namespace(&Namespace::default()).unwrap();
    assert_eq!(client(&socket).namespace(id).unwrap().id, id);
    assert_eq!(client(&socket).version(), Ok(Config::NEWEST));

    let other = NetNs::create().unwrap();
    let error = other.run(|| run_service(again)).unwrap().unwrap_err();
    assert!(error.to_string().contains("socket"), "the socket is in use: {error}");
    assert_eq!(client(&socket).namespace(id).unwrap().id, id);
}

#[test]
fn compartments_require_a_switch_and_an_existing_namespace() {
    let without = Emulator::new(config());
    let id = without.create_namespace(&Namespace::default()).unwrap();
    assert!(bind_compartment(&without, id, Some(Path::new("/proc/self/ns/net"))).is_err());
    let with = Emulator::with_switch(config(), NetNs::create().unwrap()).unwrap();
    let error = bind_compartment(&with, id, Some(Path::new("/proc/self/ns/net"))).unwrap_err();
    assert_eq!(error.class(), Class::NotFound);
    let id = with.create_namespace(&Namespace::default()).unwrap();
    bind_compartment(&with, id, Some(Path::new("/proc/self/ns/net"))).unwrap();
    bind_compartment(&with, id, None).unwrap();
    let nobody = tortie_hcn::schema::Modify::namespace_endpoint(RequestType::Add, Guid::random());
    assert!(with.modify_namespace(id, &nobody).unwrap_err().is_not_found());
}
