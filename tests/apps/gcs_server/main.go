// A server of Google Cloud Storage in memory, for the tests: fake-gcs-server, and what it lacks.
//
// Delta's library uses the XML interface, of which fake-gcs-server has a part. A put becomes an upload of its
// JSON interface: the same bytes, name and condition on the generation. A list that is to start after a name
// is cut there. fake-gcs-server keeps the objects, and decides whether a condition holds.
package main

import (
	"encoding/json"
	"encoding/xml"
	"flag"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

func main() {
	address := flag.String("address", "127.0.0.1:4443", "where to listen")
	bucket := flag.String("bucket", "lakes", "a bucket to create")
	flag.Parse()
	server, err := fakestorage.NewServerWithOptions(fakestorage.Options{
		NoListener:  true,
		Scheme:      "http",
		PublicHost:  *address,
		ExternalURL: "http://" + *address,
	})
	if err != nil {
		log.Fatal(err)
	}
	server.CreateBucketWithOpts(fakestorage.CreateBucketOpts{Name: *bucket})
	inner := server.HTTPHandler()
	log.Fatal(http.ListenAndServe(*address, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path := strings.TrimPrefix(r.URL.Path, "/")
		to, name, inside := strings.Cut(path, "/")
		if r.Method == http.MethodPut && inside && to == *bucket {
			put(inner, w, r, to, name)
			return
		}
		if after := r.URL.Query().Get("start-after"); r.Method == http.MethodGet && after != "" {
			list(inner, w, r, after)
			return
		}
		inner.ServeHTTP(w, r)
	})))
}

// list answers a list of the XML interface that starts after a name.
func list(inner http.Handler, w http.ResponseWriter, r *http.Request, after string) {
	answer := httptest.NewRecorder()
	inner.ServeHTTP(answer, r)
	var found fakestorage.ListBucketResult
	if err := xml.Unmarshal(answer.Body.Bytes(), &found); err != nil || answer.Code != http.StatusOK {
		http.Error(w, answer.Body.String(), answer.Code)
		return
	}
	found.Contents = slices.DeleteFunc(found.Contents, func(each fakestorage.Contents) bool { return each.Key <= after })
	found.KeyCount = len(found.Contents)
	made, err := xml.Marshal(found)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/xml")
	w.Write(made)
}

// put answers a PUT of the XML interface.
func put(inner http.Handler, w http.ResponseWriter, r *http.Request, bucket, name string) {
	query := url.Values{"uploadType": {"media"}, "name": {name}}
	if generation := r.Header.Get("x-goog-if-generation-match"); generation != "" {
		query.Set("ifGenerationMatch", generation)
	}
	upload := r.Clone(r.Context())
	upload.Method = http.MethodPost
	upload.URL = &url.URL{Path: fmt.Sprintf("/upload/storage/v1/b/%s/o", bucket), RawQuery: query.Encode()}
	upload.RequestURI = upload.URL.RequestURI()
	answer := httptest.NewRecorder()
	inner.ServeHTTP(answer, upload)
	var made struct {
		Etag       string `json:"etag"`
		Generation string `json:"generation"`
	}
	if answer.Code == http.StatusOK {
		if err := json.Unmarshal(answer.Body.Bytes(), &made); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("ETag", made.Etag)
		w.Header().Set("x-goog-generation", made.Generation)
	}
	w.WriteHeader(answer.Code)
}
