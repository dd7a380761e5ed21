module tortie.test/cni

go 1.24

tool github.com/containernetworking/cni/cnitool

require github.com/containernetworking/cni v1.3.0 // indirect
