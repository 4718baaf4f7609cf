// A consumer over Couchbase's gocbcore, for the tests: it streams every partition up to the high seqnos of
// the moment, checks what a DCP consumer may rely on, and prints what it found as JSON.
//
// Input (standard input): the positions to resume from, {"7": {"uuid": "1", "seqno": 5, "start": 0, "end": 9}}.
// A position that the server rolls back is resumed from the seqno of the answer, as an application would.
package main

import (
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/couchbase/gocbcore/v10"
	"github.com/couchbase/gocbcore/v10/memd"
)

type position struct {
	UUID  string `json:"uuid"`
	Seqno uint64 `json:"seqno"`
	Start uint64 `json:"start"`
	End   uint64 `json:"end"`
}

type change struct {
	Partition uint16 `json:"partition"`
	Seqno     uint64 `json:"seqno"`
	Operation string `json:"operation"`
	Key       string `json:"key"`
	Value     string `json:"value"`
}

type result struct {
	Partitions int                  `json:"partitions"`
	Count      int                  `json:"count"`
	Changes    []change             `json:"changes"`
	Faults     []string             `json:"faults"`
	Rollbacks  map[string]uint64    `json:"rollbacks"`
	Positions  map[string]*position `json:"positions"`
	Seconds    float64              `json:"seconds"`
}

// consumer follows one partition. gocbcore calls it from one goroutine for each connection.
type consumer struct {
	all     *all
	at      *position
	until   uint64
	inside  bool
	stopped bool
}

type all struct {
	sync.Mutex
	found  result
	list   bool
	limit  int
	done   chan struct{}
	left   int
	closed bool
}

func (c *consumer) fault(format string, args ...any) {
	c.all.found.Faults = append(c.all.found.Faults, fmt.Sprintf(format, args...))
}

func (c *consumer) SnapshotMarker(m gocbcore.DcpSnapshotMarker) {
	c.all.Lock()
	defer c.all.Unlock()
	if m.StartSeqNo > c.at.Seqno || m.EndSeqNo <= c.at.Seqno {
		c.fault("%d: marker [%d, %d] at seqno %d", m.VbID, m.StartSeqNo, m.EndSeqNo, c.at.Seqno)
	}
	if c.inside && c.at.Seqno != c.at.End {
		c.fault("%d: a marker inside the snapshot that ends at %d", m.VbID, c.at.End)
	}
	c.at.Start, c.at.End, c.inside = m.StartSeqNo, m.EndSeqNo, true
}

func (c *consumer) change(vb uint16, seqno uint64, operation string, key, value []byte) {
	c.all.Lock()
	defer c.all.Unlock()
	if c.stopped {
		return
	}
	if seqno <= c.at.Seqno || seqno > c.at.End {
		c.fault("%d: seqno %d after %d in the snapshot [%d, %d]", vb, seqno, c.at.Seqno, c.at.Start, c.at.End)
	}
	c.at.Seqno = seqno
	c.all.found.Count++
	if c.all.list {
		c.all.found.Changes = append(c.all.found.Changes, change{vb, seqno, operation, string(key), string(value)})
	}
	if c.all.limit > 0 && c.all.found.Count >= c.all.limit && !c.all.closed {
		c.all.closed = true
		close(c.all.done)
	}
	if seqno >= c.until {
		c.finish()
	}
}

func (c *consumer) finish() {
	if !c.stopped {
		c.stopped = true
		c.all.left--
		if c.all.left == 0 && !c.all.closed {
			c.all.closed = true
			close(c.all.done)
		}
	}
}

func (c *consumer) Mutation(m gocbcore.DcpMutation) {
	c.change(m.VbID, m.SeqNo, "mutation", m.Key, m.Value)
}
func (c *consumer) Deletion(m gocbcore.DcpDeletion) {
	c.change(m.VbID, m.SeqNo, "deletion", m.Key, nil)
}
func (c *consumer) Expiration(m gocbcore.DcpExpiration) {
	c.change(m.VbID, m.SeqNo, "expiration", m.Key, nil)
}
func (c *consumer) End(end gocbcore.DcpStreamEnd, err error)                         {}
func (c *consumer) CreateCollection(creation gocbcore.DcpCollectionCreation)         {}
func (c *consumer) DeleteCollection(deletion gocbcore.DcpCollectionDeletion)         {}
func (c *consumer) FlushCollection(flush gocbcore.DcpCollectionFlush)                {}
func (c *consumer) CreateScope(creation gocbcore.DcpScopeCreation)                   {}
func (c *consumer) DeleteScope(deletion gocbcore.DcpScopeDeletion)                   {}
func (c *consumer) ModifyCollection(modification gocbcore.DcpCollectionModification) {}
func (c *consumer) OSOSnapshot(snapshot gocbcore.DcpOSOSnapshot)                     {}
func (c *consumer) SeqNoAdvanced(advanced gocbcore.DcpSeqNoAdvanced)                 {}

func fail(what string, err error) {
	fmt.Fprintln(os.Stderr, what, err)
	os.Exit(1)
}

// open asks for a stream, and goes back where the server requires it.
func (c *consumer) open(agent *gocbcore.DCPAgent, vb uint16, opened *sync.WaitGroup) {
	uuid, _ := strconv.ParseUint(c.at.UUID, 10, 64)
	end := gocbcore.SeqNo(0xffffffffffffffff)
	_, err := agent.OpenStream(vb, memd.DcpStreamAddFlagActiveOnly, gocbcore.VbUUID(uuid),
		gocbcore.SeqNo(c.at.Seqno), end, gocbcore.SeqNo(c.at.Start), gocbcore.SeqNo(c.at.End), c,
		gocbcore.OpenStreamOptions{}, func(log []gocbcore.FailoverEntry, err error) {
			var rollback gocbcore.DCPRollbackError
			if errors.As(err, &rollback) {
				c.all.Lock()
				to := uint64(rollback.SeqNo)
				c.all.found.Rollbacks[strconv.Itoa(int(vb))] = to
				c.at.Seqno, c.at.Start, c.at.End = to, to, to
				if to == 0 {
					c.at.UUID = "0"
				}
				c.all.Unlock()
				c.open(agent, vb, opened)
				return
			}
			if err != nil {
				fail("open stream", err)
			}
			c.all.Lock()
			c.at.UUID = strconv.FormatUint(uint64(log[0].VbUUID), 10)
			if c.at.Seqno >= c.until {
				c.finish()
			}
			c.all.Unlock()
			opened.Done()
		})
	if err != nil {
		fail("open stream", err)
	}
}

func main() {
	address := flag.String("address", "", "host:port of a node")
	user := flag.String("user", "", "")
	password := flag.String("password", "", "")
	list := flag.Bool("list", false, "print every change")
	limit := flag.Int("limit", 0, "leave after this many changes, wherever that is")
	buffer := flag.Int("buffer", 0, "bytes of the flow-control window")
	ca := flag.String("ca", "", "over TLS, with this certificate as the only authority")
	flag.Parse()
	stood := map[string]*position{}
	if err := json.NewDecoder(os.Stdin).Decode(&stood); err != nil {
		fail("positions", err)
	}
	config := gocbcore.DCPAgentConfig{
		UserAgent:        "upper-test",
		BucketName:       "default",
		SeedConfig:       gocbcore.SeedConfig{MemdAddrs: []string{*address}},
		EnableCCCPPoller: true,
		SecurityConfig: gocbcore.SecurityConfig{
			Auth: gocbcore.PasswordAuthProvider{Username: *user, Password: *password},
		},
		DCPConfig: gocbcore.DCPConfig{
			UseExpiryOpcode: true, BufferSize: *buffer, AgentPriority: gocbcore.DcpAgentPriorityHigh,
		},
	}
	if *ca != "" {
		certificate, err := os.ReadFile(*ca)
		if err != nil {
			fail("certificate", err)
		}
		authorities := x509.NewCertPool()
		if !authorities.AppendCertsFromPEM(certificate) {
			fail("certificate", errors.New("the file has none"))
		}
		config.SecurityConfig.UseTLS = true
		config.SecurityConfig.TLSRootCAProvider = func() *x509.CertPool { return authorities }
	}
	agent, err := gocbcore.CreateDcpAgent(&config, fmt.Sprintf("test-%d", os.Getpid()), memd.DcpOpenFlagProducer)
	if err != nil {
		fail("agent", err)
	}
	wait := func(start func(done chan error) error) {
		done := make(chan error, 1)
		if err := start(done); err != nil {
			fail("request", err)
		}
		if err := <-done; err != nil {
			fail("request", err)
		}
	}
	wait(func(done chan error) error {
		_, err := agent.WaitUntilReady(time.Now().Add(60*time.Second), gocbcore.WaitUntilReadyOptions{},
			func(_ *gocbcore.WaitUntilReadyResult, err error) { done <- err })
		return err
	})
	highs := map[uint16]uint64{}
	faults := []string{}
	snapshot, err := agent.ConfigSnapshot()
	if err != nil {
		fail("map", err)
	}
	nodes, err := snapshot.NumServers()
	if err != nil {
		fail("map", err)
	}
	// gocbcore counts nodes from 1 here: 0 is the node that has partition 0, whichever that is.
	for node := 1; node <= nodes; node++ {
		wait(func(done chan error) error {
			_, err := agent.GetVbucketSeqnos(node, memd.VbucketStateActive, gocbcore.GetVbucketSeqnoOptions{},
				func(entries []gocbcore.VbSeqNoEntry, err error) {
					for _, entry := range entries {
						if _, known := highs[entry.VbID]; known {
							faults = append(faults, fmt.Sprintf("%d: active on two nodes", entry.VbID))
						}
						highs[entry.VbID] = uint64(entry.SeqNo)
					}
					done <- err
				})
			return err
		})
	}
	everything := &all{list: *list, limit: *limit, done: make(chan struct{})}
	everything.found = result{
		Partitions: len(highs), Rollbacks: map[string]uint64{}, Positions: map[string]*position{},
		Changes: []change{}, Faults: faults,
	}
	began := time.Now()
	var opened sync.WaitGroup
	consumers := map[uint16]*consumer{}
	for vb, high := range highs {
		at := &position{UUID: "0"}
		if known := stood[strconv.Itoa(int(vb))]; known != nil {
			at = known
		}
		everything.found.Positions[strconv.Itoa(int(vb))] = at
		if high > 0 || at.Seqno > 0 {
			consumers[vb] = &consumer{all: everything, at: at, until: high}
		}
	}
	everything.left = len(consumers)
	opened.Add(len(consumers))
	for vb, c := range consumers {
		c.open(agent, vb, &opened)
	}
	opened.Wait()
	if len(consumers) == 0 {
		close(everything.done)
	}
	select {
	case <-everything.done:
	case <-time.After(5 * time.Minute):
		fail("timeout", errors.New("the high seqnos were not reached"))
	}
	everything.Lock()
	everything.found.Seconds = time.Since(began).Seconds()
	json.NewEncoder(os.Stdout).Encode(everything.found)
}
