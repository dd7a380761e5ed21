//! What flannel has in etcd.

use tortie_flannel::{
    Acquisition, Attributes, Holder, NetConf, Previous, Ranges, Subnets, Tunnel, View, acquisition,
};
use tortie_store::etcd::{Entry, EntryChange};

use crate::input::Input;

/// flannel's configuration. The first free subnets are those of its networks.
pub fn flannel_config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(config) = NetConf::parse(text) else { return };
    for network in &config.networks {
        let Ok(range) = network.range() else { continue };
        for subnet in range.free(&std::collections::BTreeSet::new()).take(3) {
            assert!(range.contains(&subnet), "{subnet} of {text}");
            assert!(network.cidr.contains(&subnet), "{subnet} of {text}");
        }
    }
    let _ = Ranges::new(&config);
}

/// Keys with leases, and their values: pairs of texts that end with NUL, after the configuration. What a node then takes is free.
pub fn flannel_leases(bytes: &[u8]) {
    let mut input = Input(bytes);
    let Ok(ranges) = NetConf::parse(input.text()).and_then(|config| Ranges::new(&config)) else { return };
    let mut view = View::new("/f/subnets/".to_owned(), ranges);
    let mut revision = 0;
    while !input.0.is_empty() {
        let (name, value) = (input.text(), input.text());
        revision += 1;
        if let Ok(subnets) = Subnets::of_key_name(name) {
            assert_eq!(Subnets::of_key_name(&subnets.key_name()), Ok(subnets));
            assert_eq!(subnets.to_string().parse(), Ok(subnets));
            let _ = Holder::of_value(&subnets, value);
        }
        let entry = Entry {
            key: format!("/f/subnets/{name}"),
            value: value.to_owned(),
            revision,
            has_lease: revision % 2 == 0,
        };
        view.apply(EntryChange::Put(entry));
    }
    let own = Attributes { public_ip: [192, 0, 2, 7].into(), public_ipv6: None, tunnel: Tunnel::HostGw };
    let _ = view.problems();
    match acquisition(&view, &ranges, &own, None::<Previous>, 7) {
        Ok(Acquisition::Create(subnets)) => {
            assert!(ranges.contain(&subnets), "{subnets}");
            assert!(
                !view
                    .others(&subnets, own.public_ip)
                    .contains_key(&format!("/f/subnets/{}", subnets.key_name()))
            );
        }
        Ok(Acquisition::Reuse(_) | Acquisition::Wait(_)) | Err(_) => {}
    }
}
