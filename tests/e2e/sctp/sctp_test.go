package sctp

import (
	"errors"
	"io"
	"os"
	"syscall"
	"testing"
	"time"
)

// pair is an association on loopback, from both sides. It needs root.
func pair(t *testing.T, address string) (client, server *SCTPConn) {
	t.Helper()
	to, err := ResolveSCTPAddr("sctp", address)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := ListenSCTP("sctp", to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	client, err = DialSCTP("sctp", nil, to)
	if err != nil {
		t.Fatal(err)
	}
	server, err = listener.AcceptSCTP()
	if err != nil {
		t.Fatal(err)
	}
	return client, server
}

func read(t *testing.T, c *SCTPConn) string {
	t.Helper()
	buffer := make([]byte, 1024)
	c.SetReadDeadline(time.Now().Add(5 * time.Second))
	n, err := c.Read(buffer)
	if err != nil {
		t.Fatal(err)
	}
	return string(buffer[:n])
}

func TestMessagesPassInBothDirections(t *testing.T) {
	client, server := pair(t, "127.0.0.1:9001")
	for _, message := range []string{"one", "second", "and a third"} {
		for _, ends := range [][2]*SCTPConn{{client, server}, {server, client}} {
			if n, err := ends[0].Write([]byte(message)); n != len(message) || err != nil {
				t.Fatal(n, err)
			}
			if got := read(t, ends[1]); got != message {
				t.Fatalf("%q, not %q", got, message)
			}
		}
	}
	if address, _ := server.SCTPRemoteAddr(0); address.IPAddrs[0].String() != "127.0.0.1" || address.Port == 9001 {
		t.Fatal(address)
	}
}

func TestWhatWasSentBeforeTheEndIsRead(t *testing.T) {
	client, server := pair(t, "127.0.0.1:9002")
	if _, err := server.Write([]byte("last")); err != nil {
		t.Fatal(err)
	}
	server.Close()
	if _, err := client.Write([]byte("late")); err != nil {
		t.Fatal(err)
	}
	if got := read(t, client); got != "last" {
		t.Fatal(got)
	}
	if _, err := client.Read(make([]byte, 10)); err != io.EOF {
		t.Fatal(err)
	}
}

func TestNobodyAnswers(t *testing.T) {
	to, _ := ResolveSCTPAddr("sctp", "127.0.0.1:9003")
	if _, err := DialSCTP("sctp", nil, to); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Fatal(err)
	}
}

func TestReadsHaveADeadline(t *testing.T) {
	client, _ := pair(t, "127.0.0.1:9004")
	client.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if _, err := client.Read(make([]byte, 10)); err != os.ErrDeadlineExceeded {
		t.Fatal(err)
	}
}

func TestPacketsSurviveTheirEncoding(t *testing.T) {
	sent := packet{source: []byte{10, 0, 0, 1}, destination: []byte{10, 0, 0, 2}, from: 1, to: 2, tag: 3, chunks: []chunk{
		{kind: kindSack, value: sack(7)}, {kind: kindData, flags: wholeMessage, value: data(9, 8, []byte("odd"))},
	}}
	bytes := sent.encode()
	got, ok := parse(bytes)
	if !ok || len(got.chunks) != 2 || string(got.chunks[1].value[12:]) != "odd" || got.tag != 3 || got.peer() != sent.peer() {
		t.Fatal(got, ok)
	}
	for index := 12; index < len(bytes); index++ {
		damaged := clone(bytes)
		damaged[index] ^= 4
		// The kernel checks the addresses.
		if _, ok := parse(damaged); ok && index >= 20 {
			t.Fatal("damage is not seen at", index)
		}
		parse(bytes[:index])
	}
}
