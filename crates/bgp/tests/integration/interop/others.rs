//! FRR and GoBGP as peers.

use std::process::Command;

use tortie_bgp::codec::{Attributes, Community, LargeCommunity};
use tortie_servers::programs::{Program, can_run};

use crate::interop::lab::{AS, Lab, Tortie, config, here, ipv4, ipv6, peer, until};

/// Routes of Tortie, with communities.
fn advertise(tortie: &Tortie) {
    let attributes = Attributes {
        communities: vec![Community(64512 << 16 | 99)],
        large_communities: vec![LargeCommunity(4_200_000_000, 5, 6)],
        ..here()
    };
    tortie.advertise(&[("10.1.0.0/16", attributes), ("fd01::/32", here())]);
}

/// Waits for the routes of the peer.
fn receive(tortie: &Tortie) {
    until("Tortie has the routes", || {
        tortie.route("10.20.0.0/16").is_some() && tortie.route("fd20::/32").is_some()
    });
    assert_eq!(tortie.route("10.20.0.0/16").unwrap().attributes.next_hop.address, ipv4(2));
    assert_eq!(tortie.route("fd20::/32").unwrap().attributes.next_hop.address, ipv6(2));
}

/// Runs a client on node 2 and returns what it printed.
fn ask(lab: &Lab, program: &std::path::Path, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(lab.folder.path());
    lab.namespace(2).enter_on_spawn(&mut command).unwrap();
    let output = command.output().unwrap();
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn gobgp_and_tortie_exchange_routes() {
    if !can_run(&[Program::Gobgpd, Program::Gobgp]) {
        return;
    }
    let lab = Lab::new(2);
    let families = ["ipv4-unicast", "ipv6-unicast"].map(|name| {
        format!("[[neighbors.afi-safis]]\n[neighbors.afi-safis.config]\nafi-safi-name = \"{name}\"\n[neighbors.afi-safis.mp-graceful-restart.config]\nenabled = true\n")
    });
    let text = format!(
        "[global.config]\nas = {AS}\nrouter-id = \"10.9.0.2\"\n[[neighbors]]\n[neighbors.config]\nneighbor-address = \"10.9.0.1\"\npeer-as = {AS}\nauth-password = \"secret\"\n[neighbors.graceful-restart.config]\nenabled = true\nnotification-enabled = true\nrestart-time = 20\n[neighbors.timers.config]\nhold-time = 30\nkeepalive-interval = 10\nconnect-retry = 1\n{}",
        families.concat()
    );
    std::fs::write(lab.path("gobgp.toml"), text).unwrap();
    let _daemon = lab.start(
        2,
        "gobgp",
        Program::Gobgpd,
        &["-t", "toml", "-f", "gobgp.toml", "--api-hosts", "127.0.0.1:50051"],
    );
    let client = Program::Gobgp.find().unwrap();
    let gobgp = |line: &str| ask(&lab, &client, &line.split(' ').collect::<Vec<_>>());
    until("GoBGP answers", || gobgp("global").contains("10.9.0.2"));
    gobgp("global rib add 10.20.0.0/16 nexthop 10.9.0.2 community 64512:7");
    gobgp("global rib -a ipv6 add fd20::/32 nexthop fd09::2");
    let mut peer = peer(1, 2, AS);
    peer.transport.password = Some(tortie_bgp::speaker::Password("secret".to_owned()));
    let tortie = Tortie::start(&lab, 1, config(1, [(2, peer)]), false);
    advertise(&tortie);
    until("GoBGP has the routes", || {
        gobgp("global rib -a ipv6 fd01::/32").contains("fd09::1")
            && gobgp("global rib 10.1.0.0/16").contains("10.9.0.1")
    });
    let shown = gobgp("global rib 10.1.0.0/16");
    assert!(shown.contains("64512:99") && shown.contains("4200000000:5:6"), "{shown}");
    receive(&tortie);
    assert_eq!(tortie.route("10.20.0.0/16").unwrap().attributes.communities, [Community(64512 << 16 | 7)]);
    gobgp("global rib del 10.20.0.0/16");
    until("Tortie loses the route", || tortie.route("10.20.0.0/16").is_none());
    // RFC 9003 and RFC 8538: the end by the operator is no restart.
    tortie.shut_down("moving");
    until("GoBGP loses the routes", || !gobgp("global rib 10.1.0.0/16").contains("10.9.0.1"));
}

#[test]
fn frr_and_tortie_exchange_routes() {
    if !can_run(&[Program::FrrBgpd]) {
        return;
    }
    let lab = Lab::new(2);
    let text = format!(
        "router bgp {AS}\n bgp router-id 10.9.0.2\n no bgp network import-check\n neighbor 10.9.0.1 remote-as {AS}\n neighbor 10.9.0.1 timers 10 30\n neighbor 10.9.0.1 timers connect 1\n neighbor 10.9.0.1 update-source 10.9.0.2\n address-family ipv4 unicast\n  network 10.20.0.0/16\n  neighbor 10.9.0.1 activate\n exit-address-family\n address-family ipv6 unicast\n  network fd20::/32\n  neighbor 10.9.0.1 activate\n  neighbor 10.9.0.1 route-map six out\n exit-address-family\nexit\nroute-map six permit 1\n set ipv6 next-hop global fd09::2\nexit\n"
    );
    std::fs::write(lab.path("bgpd.conf"), text).unwrap();
    let folder = lab.folder.path().display().to_string();
    let arguments =
        ["-f", "bgpd.conf", "-i", "bgpd.pid", "-Z", "-S", "-n", "--vty_socket", &folder, "-P", "0"];
    let _daemon = lab.start(2, "bgpd", Program::FrrBgpd, &arguments);
    let tortie = Tortie::start(&lab, 1, config(1, [(2, peer(1, 2, AS))]), false);
    advertise(&tortie);
    let client = std::path::Path::new("/usr/bin/vtysh");
    let show = |what: &str| {
        let command = format!("show bgp {what}");
        ask(&lab, client, &["--vty_socket", &folder, "-d", "bgpd", "-c", &command])
    };
    until("FRR has the routes", || {
        show("ipv4 unicast 10.1.0.0/16").contains("10.9.0.1")
            && show("ipv6 unicast fd01::/32").contains("fd09::1")
    });
    let shown = show("ipv4 unicast 10.1.0.0/16");
    assert!(shown.contains("64512:99") && shown.contains("4200000000:5:6"), "{shown}");
    receive(&tortie);
}
