// Command agnhost is the program of the image "agnhost" that Kubernetes' test suites run in pods.
//
// It has the subcommands that the network suites use, from the suites' own sources. The image is built from it by
// `cargo xtask e2e`, as no image can be downloaded in tests. SCTP is that of the folder
// sctp, because the kernel may have none.
package main

import (
	"os"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/test/images/agnhost/connect"
	"k8s.io/kubernetes/test/images/agnhost/dns"
	"k8s.io/kubernetes/test/images/agnhost/liveness"
	"k8s.io/kubernetes/test/images/agnhost/net"
	"k8s.io/kubernetes/test/images/agnhost/netexec"
	"k8s.io/kubernetes/test/images/agnhost/nettest"
	nosnat "k8s.io/kubernetes/test/images/agnhost/no-snat-test"
	nosnatproxy "k8s.io/kubernetes/test/images/agnhost/no-snat-test-proxy"
	"k8s.io/kubernetes/test/images/agnhost/pause"
	portforwardtester "k8s.io/kubernetes/test/images/agnhost/port-forward-tester"
	"k8s.io/kubernetes/test/images/agnhost/porter"
	servehostname "k8s.io/kubernetes/test/images/agnhost/serve-hostname"
	tcpreset "k8s.io/kubernetes/test/images/agnhost/tcp-reset"
	testwebserver "k8s.io/kubernetes/test/images/agnhost/test-webserver"
)

func main() {
	root := &cobra.Command{Use: "agnhost"}
	root.AddCommand(
		connect.CmdConnect,
		dns.CmdDNSSuffix,
		dns.CmdDNSServerList,
		dns.CmdEtcHosts,
		liveness.CmdLiveness,
		net.CmdNet,
		netexec.CmdNetexec,
		nettest.CmdNettest,
		nosnat.CmdNoSnatTest,
		nosnatproxy.CmdNoSnatTestProxy,
		pause.CmdPause,
		porter.CmdPorter,
		portforwardtester.CmdPortForwardTester,
		servehostname.CmdServeHostname,
		tcpreset.CmdTCPReset,
		testwebserver.CmdTestWebserver,
	)
	os.Exit(cli.Run(root))
}
